"""The wire between worker and ranks."""

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st

from meshift.backends.sglang import wire
from meshift.schemas.identity import RequestKey

keys = st.builds(RequestKey, st.text(min_size=1, max_size=12), st.integers(0, 40), st.integers(0, 40))
# Ids made to collide: of the characters that the encoding itself uses.
nasty_keys = st.builds(
    RequestKey, st.text(alphabet="1:/.;", min_size=1, max_size=12), st.integers(0, 120), st.integers(0, 120)
)


@hypothesis.given(keys)
def test_rid_round_trip(key: RequestKey) -> None:
    assert wire.decode_rid(wire.encode_rid(key)) == key


@hypothesis.given(nasty_keys, nasty_keys)
def test_no_rid_is_a_prefix_of_another(one: RequestKey, other: RequestKey) -> None:
    prefix = wire.encode_rid(other).startswith(wire.encode_rid(one))
    assert prefix == (one == other)


@pytest.mark.parametrize("rid", ["", "1:a/1.0", "2:a/1.0;", "1:a/1;", "HEALTH_CHECK_1"])
def test_foreign_rids_are_refused(rid: str) -> None:
    with pytest.raises(ValueError, match="not a request id of ours"):
        wire.decode_rid(rid)


def test_commands_have_sglang_s_form() -> None:
    """Arrays that begin with a tag, of which SGLang's decoder makes one union with its own types."""
    for command in wire.COMMANDS:
        config = command.__struct_config__
        assert config.array_like
        assert str(config.tag).startswith("meshift.")
    assert msgspec.msgpack.decode(wire.encode(wire.Cancel(rid="x"))) == ["meshift.cancel", "x"]


def test_reports_round_trip() -> None:
    load = wire.LoadSnapshot(
        capacity=9, used=1, cached=2, free=6, reserved=0, running=1, waiting=0, head_demand=0, queued_demand=0,
        step_count=3, submits_seen=4,
    )  # fmt: skip
    finish = wire.FinishRow(
        row=0,
        reason="stop",
        matched_stop="x",
        message="",
        param=None,
        cached_tokens=0,
        preemptions=0,
        preemption_loss_ns=0,
    )
    step = wire.StepReport(
        iteration=1, tickets=[1], starts=[0], counts=[1], tokens=b"\0" * 4, finishes=[finish], logprobs=None, load=load
    )
    for report in (load, step, wire.RankPhase(rank=1, phase="p")):
        assert wire.decode_report(wire.encode(report)) == report
    with pytest.raises(msgspec.MsgspecError):
        wire.decode_report(b"\xc1")
