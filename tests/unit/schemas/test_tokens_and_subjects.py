"""Packed tokens, subjects, limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshift.schemas import limits, subjects
from meshift.schemas.base import TOKEN_BYTES, count_tokens, pack_tokens, unpack_tokens
from meshift.schemas.requests import ReplayReply, ReplayState
from meshift.services.bus.codec import decode, encode
from meshift.services.bus.subjects import check_pattern, check_subject, matches
from tests.unit.schemas.samples import OWNER

TOKEN = st.integers(-(2**31), 2**31 - 1)
NAME = st.text("abz019-_", min_size=1, max_size=5)


@given(st.lists(TOKEN))
def test_tokens_come_back(tokens: list[int]) -> None:
    packed = pack_tokens(tokens)
    assert list(unpack_tokens(packed)) == tokens
    assert count_tokens(packed) == len(tokens)
    assert len(packed) == TOKEN_BYTES * len(tokens)
    reply = ReplayReply(owner=OWNER, state=ReplayState.RUNNING, tokens=packed)
    assert decode(ReplayReply, encode(reply)).tokens == packed


def test_tokens_are_little_endian_on_the_wire() -> None:
    assert pack_tokens([1, -2]) == b"\x01\0\0\0\xfe\xff\xff\xff"


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1])
def test_a_token_that_doesn_t_fit_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        pack_tokens([token])


def test_limits_fit_together() -> None:
    assert limits.PAYLOAD_BYTES_MAX + limits.MESSAGE_HEADROOM_BYTES == limits.MESSAGE_BYTES_MAX
    assert limits.PAYLOAD_BYTES_MAX > limits.REQUEST_ID_CHARS_MAX + limits.STOP_STRINGS_MAX * (
        4 * limits.STOP_STRING_CHARS_MAX
    )


@pytest.mark.parametrize("name", ["a", "w-1", "W_1", "x" * 64])
def test_good_names(name: str) -> None:
    assert subjects.check_name(name) == name


@pytest.mark.parametrize("name", ["", "a.b", "a b", "*", ">", "ü", "x" * 65, "a\n"])
def test_bad_names(name: str) -> None:
    with pytest.raises(ValueError, match="1 to 64 letters"):
        subjects.check_name(name)


def test_all_subjects_are_valid_and_differ() -> None:
    constants = [value for name, value in vars(subjects).items() if name.isupper() and name[0] != "_"]
    constants.remove(subjects.PREFIX)
    made = [
        value("w1") for name, value in vars(subjects).items() if name.startswith(("worker_", "frontend_", "launcher_"))
    ]
    everything = constants + made
    assert len(everything) >= 12
    assert len(set(everything)) == len(everything)
    for subject in everything:
        check_pattern(subject)
        assert matches(f"{subjects.PREFIX}.>", subject)
    for subject in made:
        check_subject(subject)
    assert matches(subjects.LOAD, subjects.worker_load("w1"))


@given(st.lists(NAME, min_size=1, max_size=4), st.data())
def test_patterns_made_from_a_subject_match_it(tokens: list[str], data: st.DataObject) -> None:
    subject = ".".join(tokens)
    starred = [data.draw(st.sampled_from([token, "*"])) for token in tokens]
    cut = data.draw(st.integers(0, len(tokens) - 1))
    assert matches(check_pattern(".".join(starred)), subject)
    assert matches(check_pattern(".".join([*starred[:cut], ">"])), subject)
    assert not matches(check_pattern(".".join([*starred, "*"])), subject)
    assert not matches(check_pattern(".".join([*starred, ">"])), subject)
    changed = [*tokens[:cut], tokens[cut] + "x", *tokens[cut + 1 :]]
    assert not matches(subject, ".".join(changed))
