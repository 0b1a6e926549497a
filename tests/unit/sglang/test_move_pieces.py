"""Parts of moves that need no ranks: who sends what to whom, agreement, state, names of requests, weights."""

import asyncio
from pathlib import Path

import pytest

from meshift.backends.base import EngineRequest, MoveKey, MoveRefused, Refusal
from meshift.backends.sglang import wire, wire_moves
from meshift.backends.sglang.pairs import from_wire, hashes_of, layout_of, pairs_of, part_of, to_wire
from meshift.backends.sglang.questions import Questions, RanksDiffer, accepted, agreed, same
from meshift.backends.sglang.requests import RequestTable
from meshift.backends.sglang.state import pack_state, unpack_state
from meshift.backends.sglang.weights import fingerprint
from meshift.kv_memory.layout import KvLayout
from meshift.kv_memory.transport.base import Address
from meshift.schemas.errors import InvalidRequest
from meshift.schemas.identity import RequestKey
from meshift.schemas.requests import Sampling

KEY = MoveKey("r", 1, 1)
STATE = wire_moves.MovedState(
    version=wire_moves.STATE_VERSION, seed=-5, cached_tokens=3, preemptions=1, preemption_loss_ns=9, waits_ns=None
)


def share(layers: tuple[int, int], heads: tuple[int, int], obstacle: str = "") -> wire_moves.Share:
    return wire_moves.Share(
        layer_start=layers[0],
        layer_end=layers[1],
        head_start=heads[0],
        head_end=heads[1],
        head_dim=4,
        dtype="float32",
        obstacle=obstacle,
    )


def done(rank: int, nonce: int = 1, iteration: int = 7) -> wire_moves.Done:
    return wire_moves.Done(rank=rank, nonce=nonce, iteration=iteration)


def refused(rank: int, refusal: Refusal = Refusal.BUSY) -> wire_moves.Refused:
    return wire_moves.Refused(rank=rank, nonce=1, iteration=7, refusal=refusal.value, message="no")


def test_a_layout_of_stages_and_tensor_ranks() -> None:
    shares = [share((0, 5), (0, 2)), share((0, 5), (2, 4)), share((5, 8), (0, 2)), share((5, 8), (2, 4))]
    layout = layout_of(shares, 2, "w")
    assert layout == KvLayout(((0, 5), (5, 8)), ((0, 2), (2, 4)), 4, "float32", "w")
    assert layout_of([*shares[:3], share((5, 8), (2, 4), "copies of heads")], 2, "w") is None


def test_pairs_are_the_same_at_both_ends() -> None:
    source = KvLayout(((0, 5), (5, 8)), ((0, 4),), 4, "float32", "w")
    destination = KvLayout(((0, 8),), ((0, 2), (2, 4)), 4, "float32", "w")
    pairs = pairs_of(KEY, source, destination)
    assert [(pair.source, pair.destination) for pair in pairs] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({pair.transfer_id for pair in pairs}) == 4
    part = part_of(2, pairs[2], pairs[2].source)
    assert (part.pair, part.rank, part.layer_start, part.layer_end) == (2, 1, 5, 8)
    assert (part.head_start, part.head_end) == (0, 2)
    with pytest.raises(ValueError, match="do not cover"):
        pairs_of(KEY, source, KvLayout(((0, 7),), ((0, 4),), 4, "float32", "w"))


def test_addresses_and_hashes_on_the_wire() -> None:
    address = Address("tcp", "127.0.0.1:9", 3, "secret")
    assert from_wire(to_wire(address)) == address
    parts = [wire_moves.PairHash(pair=1, hash="f" * 32), wire_moves.PairHash(pair=0, hash="0" * 31 + "1")]
    assert hashes_of(parts) == (0, 2**60 - 1)


def test_ranks_agree_or_are_not_trusted() -> None:
    assert len(agreed([done(0), done(1)], wire_moves.Done)) == 2
    with pytest.raises(MoveRefused) as caught:
        agreed([refused(0), refused(1)], wire_moves.Done)
    assert caught.value.refusal is Refusal.BUSY
    differing: list[list[wire.Answer]] = [[done(0), refused(1)], [done(0), done(1, iteration=8)]]
    for answers in differing:
        with pytest.raises(RanksDiffer):
            agreed(answers, wire_moves.Done)
    with pytest.raises(RanksDiffer):
        agreed([done(0)], wire_moves.Begun)
    same([1, 1], "things")
    with pytest.raises(RanksDiffer, match="things"):
        same([1, 2], "things")


def test_answers_of_different_iterations_may_be_accepted() -> None:
    assert len(accepted([done(0), done(1, iteration=9)], wire_moves.Done)) == 2
    with pytest.raises(MoveRefused):
        accepted([done(0), refused(1)], wire_moves.Done)


async def test_a_question_waits_for_all_ranks() -> None:
    questions, heard = Questions(2), list[wire.Answer]()
    with questions.ask(heard.append) as question:
        questions.note(done(1, question.nonce))
        with pytest.raises(TimeoutError):
            await question.answers(0.001)
        assert heard == []
        questions.note(done(0, question.nonce))
        assert heard == [done(0, question.nonce)], "not told at once"
        assert [answer.rank for answer in await question.answers(1.0)] == [0, 1]
    questions.note(done(0, question.nonce))
    assert len(heard) == 1, "a late answer was heard"


async def test_a_question_to_dead_ranks() -> None:
    questions = Questions(1)
    with questions.ask() as question:
        waiting = asyncio.ensure_future(question.answers(1.0))
        await asyncio.sleep(0)
        questions.abandon("they died")
        with pytest.raises(ConnectionError, match="they died"):
            await waiting
        questions.note(done(0, question.nonce))
    with questions.ask() as late, pytest.raises(ConnectionError, match="they died"):
        await late.answers(1.0)


def test_state_round_trip_and_strangers() -> None:
    assert unpack_state(pack_state(STATE)) == STATE
    newer = wire_moves.MovedState(
        version=wire_moves.STATE_VERSION + 1, seed=0, cached_tokens=0, preemptions=0, preemption_loss_ns=0, waits_ns=1
    )
    for data in (b"", b'{"admitted_ns": 1}', pack_state(newer)):
        with pytest.raises(MoveRefused) as caught:
            unpack_state(data)
        assert caught.value.refusal is Refusal.INCOMPATIBLE


def test_a_request_gets_another_key() -> None:
    table = RequestTable()
    old, new = RequestKey("r", 1, 0), RequestKey("r", 2, 0)
    submit = table.open(EngineRequest(old, [1], (), Sampling(max_new_tokens=4)), seed=1)
    table.rename(old, new)
    table.rename(old, RequestKey("r", 9, 0))
    assert table.rid(new) == submit.rid == wire.encode_rid(old)
    assert table.rid(old) is None
    for key in (old, new):
        with pytest.raises(InvalidRequest):
            table.open(EngineRequest(key, [1], (), Sampling(max_new_tokens=4)), seed=1)


def test_a_request_that_moved_is_forgotten() -> None:
    table = RequestTable()
    here, there = RequestKey("r", 1, 0), RequestKey("r", 1, 1)
    request = EngineRequest(here, [1], (), Sampling(max_new_tokens=4))
    table.open(request, seed=1)
    table.forget(here)
    table.forget(here)
    assert not len(table)
    assert table.has_seen(here)
    # One whose commit was refused has never been here.
    arrival = EngineRequest(there, [1], (5,), Sampling(max_new_tokens=4))
    for _ in range(2):
        assert table.open(arrival, seed=1, moved=True).rid == wire.encode_rid(there)
        table.forget(there, ended=False)
    assert not table.has_seen(there)


def test_fingerprints_tell_weights_apart(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path, weights in zip(paths, (b"x" * 1000, b"x" * 1000, b"x" * 999 + b"y"), strict=True):
        path.mkdir()
        (path / "model.safetensors").write_bytes(weights)
    first, second, third = map(fingerprint, paths)
    assert first == second != third
    (paths[1] / "config.json").write_text("{}")
    assert fingerprint(paths[1]) != first
    assert fingerprint(Path("org/model")) == "name:org/model"
