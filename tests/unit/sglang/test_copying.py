"""KV from one rank's pool to others' by their data threads, without SGLang: pieces, refusals, staging memory."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshift.backends.sglang import wire_moves
from meshift.backends.sglang.pairs import pairs_of, part_of, to_wire
from meshift.backends.sglang.plugin import copying
from meshift.backends.sglang.plugin.copying import Copy, RowReader, part_rectangle
from meshift.backends.sglang.plugin.data_plane import DataPlane, Round
from meshift.backends.sglang.plugin.kv import RankKv
from meshift.backends.sglang.plugin.receiving import Receiver, Reservation
from meshift.kv_memory.layout import KvLayout
from meshift.kv_memory.rectangle import Rectangle
from meshift.kv_memory.transport.base import Patch
from tests.unit.sglang.scripted_ranks import LAYOUT
from tests.unit.sglang.test_move_pieces import KEY

SLOTS, HEAD_DIM = 64, 4
WAIT_S = 10.0
SOURCE = KvLayout(((0, 2), (2, 4)), ((0, 2),), HEAD_DIM, "float32", "w")
DESTINATION = KvLayout(((0, 3), (3, 4)), ((0, 1), (1, 2)), HEAD_DIM, "float32", "w")
assert LAYOUT != SOURCE


class Pool:
    """A rank's, with the attributes of SGLang's that are looked at."""

    store_dtype = torch.float32
    device = "cpu"

    def __init__(self, layers: tuple[int, int], heads: int, filled: bool) -> None:
        shape = (SLOTS, heads, HEAD_DIM)
        make = torch.rand if filled else torch.zeros
        self.buffers = {layer: (make(shape), make(shape)) for layer in range(*layers)}

    def get_kv_buffer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.buffers[layer]


class Box:
    """An outbox that keeps."""

    def __init__(self) -> None:
        self.reports: queue.Queue[Any] = queue.Queue()

    def send(self, report: Any) -> None:
        self.reports.put(report)

    def wait(self, kind: type) -> Any:
        """The next report of a kind."""
        while not isinstance(report := self.reports.get(timeout=WAIT_S), kind):
            pass
        return report


class Rank:
    """One, with its pool, and a data thread that listens."""

    def __init__(self, layout: KvLayout, index: int, *, filled: bool) -> None:
        stage, tensor = divmod(index, len(layout.head_ranges))
        layers, heads = layout.layer_ranges[stage], layout.head_ranges[tensor]
        share = wire_moves.Share(
            layer_start=layers[0],
            layer_end=layers[1],
            head_start=heads[0],
            head_end=heads[1],
            head_dim=HEAD_DIM,
            dtype="float32",
        )
        self.index, self.box = index, Box()
        self.kv = RankKv(Pool(layers, heads[1] - heads[0], filled), share)
        self.data = DataPlane(index, "127.0.0.1", lambda: self.box)  # type: ignore[arg-type,return-value]
        self.data.start()
        self.applied: dict[int, int] = {}

    def receive(self, part: wire_moves.PairPart, reservation: Reservation) -> wire_moves.TargetAddress:
        receiver = Receiver(part, reservation, self.kv, self.applied.__setitem__)
        reservation.receivers.append(receiver)
        return to_wire(self.data.open_transfer(part.transfer_id, receiver.apply))


@pytest.fixture
def ranks() -> Iterator[tuple[list[Rank], list[Rank]]]:
    """Of both ends."""
    torch.manual_seed(5)
    sources = [Rank(SOURCE, index, filled=True) for index in range(2)]
    destinations = [Rank(DESTINATION, index, filled=False) for index in range(4)]
    yield sources, destinations
    for rank in [*sources, *destinations]:
        assert rank.data.staging.used_bytes == 0
        assert rank.data.close()


def reserve(destinations: list[Rank], cached: int, slots: torch.Tensor) -> list[wire_moves.PairTarget]:
    """The same slots on all ranks."""
    targets = []
    reservations = {rank.index: Reservation(cached, None, None, "cpu") for rank in destinations}
    for reservation in reservations.values():
        reservation.slots = slots
    for index, pair in enumerate(pairs_of(KEY, SOURCE, DESTINATION)):
        rank = destinations[pair.destination]
        address = rank.receive(part_of(index, pair, pair.destination), reservations[rank.index])
        targets.append(wire_moves.PairTarget(part=part_of(index, pair, pair.source), address=address))
    return targets


def send(rank: Rank, targets: list[wire_moves.PairTarget], slots: torch.Tensor, start: int, end: int) -> Round:
    """One round, piece by piece."""
    copy, round_ = begin(rank, targets, slots, (start, end))
    until(copy.go_on, "all of it is gathered")
    return round_


def begin(
    rank: Rank, targets: list[wire_moves.PairTarget], slots: torch.Tensor, span: tuple[int, int], nonce: int = 9
) -> tuple[Copy, Round]:
    copy, round_ = Copy(targets, rank.index, 0, span), Round(nonce, WAIT_S)
    copy.begin(RowReader(rank.kv, slots), rank.data, round_)
    return copy, round_


def until(condition: Callable[[], bool], what: str) -> None:
    """Look again and again, as a step thread does."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.001)


def sent(rank: Rank) -> wire_moves.Sent:
    report = rank.box.wait(wire_moves.Sent)
    assert isinstance(report, wire_moves.Sent)
    return report


@pytest.mark.parametrize("piece_bytes", [1, 1000, 1 << 20])
@pytest.mark.parametrize("beside_steps", [True, False])
def test_all_cells_arrive(
    ranks: tuple[list[Rank], list[Rank]], monkeypatch: pytest.MonkeyPatch, piece_bytes: int, beside_steps: bool
) -> None:
    monkeypatch.setattr(copying, "PIECE_BYTES_MAX", piece_bytes)
    for rank in ranks[0]:
        rank.kv.beside_steps = beside_steps
    sources, destinations = ranks
    cached, tokens = 3, 20
    there, here = torch.randperm(SLOTS)[:tokens], torch.randperm(SLOTS)[: tokens + 4]
    targets = reserve(destinations, cached, here[cached:])
    for rank in sources:
        for start, end in ((cached, 11), (11, tokens), (tokens, tokens)):
            assert send(rank, targets, there, start, end).byte_count == sum(
                rank.kv.byte_count(part_rectangle(target.part, start, end))
                for target in targets
                if target.part.rank == rank.index
            )
            assert sent(rank).error == ""
    for target in targets:
        source, destination = (
            sources[target.part.rank],
            next(rank for rank in destinations if target.part.pair in rank.applied),
        )
        assert destination.applied[target.part.pair] == tokens
        [ours] = RowReader(source.kv, there).hashes([target.part], cached, tokens)
        [theirs] = RowReader(destination.kv, here[cached:], cached).hashes([target.part], cached, tokens)
        assert ours == theirs


@pytest.fixture
def held_up(ranks: tuple[list[Rank], list[Rank]]) -> Iterator[tuple[Rank, list[Rank], threading.Event]]:
    """A source, destinations that apply nothing until the event is set, and that event."""
    (rank, _), destinations = ranks
    gate = threading.Event()
    for destination in destinations:
        destination.data.run(partial(_wait, gate))
    yield rank, destinations, gate
    gate.set()


def _wait(gate: threading.Event) -> None:
    gate.wait(WAIT_S)


def test_a_copy_keeps_to_the_pace_of_what_is_applied(
    held_up: tuple[Rank, list[Rank], threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, destinations, gate = held_up
    monkeypatch.setattr(copying, "PIECE_BYTES_MAX", 1)
    reads: queue.Queue[int] = queue.Queue()
    gather = rank.kv.gather

    def counted(rectangle: Rectangle, slots: torch.Tensor, out: memoryview) -> None:
        reads.put(rectangle.token_start)
        gather(rectangle, slots, out)

    monkeypatch.setattr(rank.kv, "gather", counted)
    # One pair, one token a piece.
    targets = [reserve(destinations, 0, torch.arange(16))[0]]
    copy, _ = begin(rank, targets, torch.arange(16), (0, 16))
    for number in range(copying.PIECES_UNDER_WAY_MAX):
        assert reads.get(timeout=WAIT_S) == number
    # Whatever the data thread had to do before this is done now.
    passed = threading.Event()
    rank.data.run(passed.set)
    assert passed.wait(WAIT_S)
    assert reads.empty()
    assert not copy.go_on()
    gate.set()
    assert sent(rank).error == ""
    assert copy.go_on()


def test_a_copy_that_is_given_up_ends(
    held_up: tuple[Rank, list[Rank], threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, destinations, gate = held_up
    monkeypatch.setattr(copying, "PIECE_BYTES_MAX", 1)
    targets = [reserve(destinations, 0, torch.arange(16))[0]]
    copy, round_ = begin(rank, targets, torch.arange(16), (0, 16))
    copy.given_up = True
    gate.set()
    until(copy.go_on, "an end")
    assert sent(rank).nonce == round_.nonce
    assert max(d.applied.get(0, 0) for d in destinations) <= copying.PIECES_UNDER_WAY_MAX


def test_what_cannot_be_read_breaks_the_round(
    ranks: tuple[list[Rank], list[Rank]], caplog: pytest.LogCaptureFixture
) -> None:
    (rank, _), destinations = ranks
    targets = reserve(destinations, 0, torch.arange(16))
    copy, _ = begin(rank, targets, torch.full((8,), SLOTS), (0, 8))
    assert "IndexError" in sent(rank).error
    assert copy.go_on()
    assert "can't be gathered" in caplog.text


def test_with_staging_memory_full(ranks: tuple[list[Rank], list[Rank]]) -> None:
    (rank, _), destinations = ranks
    targets = reserve(destinations, 0, torch.arange(16))
    taken = rank.data.staging.try_acquire(rank.data.staging.capacity_bytes)
    assert taken is not None
    # Beside the steps it goes on, a piece at a time, in memory of its own.
    send(rank, targets, torch.arange(8), 0, 8)
    assert sent(rank).error == ""
    # A step doesn't wait for memory, unless the request stands still.
    rank.kv.beside_steps = False
    copy, _ = begin(rank, targets, torch.arange(8), (0, 8), nonce=10)
    assert not copy.go_on()
    frozen, _ = begin(rank, targets, torch.arange(8), (0, 8), nonce=11)
    frozen.finish()
    assert frozen.gathered
    assert sent(rank).nonce == 11
    taken.release()
    assert copy.go_on()
    assert sent(rank).nonce == 10


def test_a_closed_transfer_breaks_the_round(ranks: tuple[list[Rank], list[Rank]]) -> None:
    (rank, _), destinations = ranks
    targets = reserve(destinations, 0, torch.arange(16))
    closed = next(target.part.transfer_id for target in targets if target.part.rank == 0)
    for destination in destinations:
        destination.data.report_when_quiet(4, [closed, "unknown"])
        assert destination.box.wait(wire_moves.Quiet).nonce == 4
    send(rank, targets, torch.arange(8), 0, 8)
    assert sent(rank).error != ""


def test_quiet_without_transfers(ranks: tuple[list[Rank], list[Rank]]) -> None:
    rank = ranks[0][0]
    rank.data.report_when_quiet(5, [])
    assert rank.box.wait(wire_moves.Quiet) == wire_moves.Quiet(rank=0, nonce=5)


# ---- what a receiver takes


PART = wire_moves.PairPart(pair=0, rank=0, transfer_id="t", layer_start=0, layer_end=2, head_start=0, head_end=2)


def receiver() -> tuple[Receiver, dict[int, int]]:
    """Of tokens [4, 12)."""
    share = wire_moves.Share(layer_start=0, layer_end=2, head_start=0, head_end=2, head_dim=HEAD_DIM, dtype="float32")
    reservation, applied = Reservation(4, None, None, "cpu"), dict[int, int]()
    reservation.slots = torch.arange(8)
    kv = RankKv(Pool((0, 2), 2, filled=False), share)
    return Receiver(PART, reservation, kv, applied.__setitem__), applied


def patch(start: int, end: int, *, generation: int = 0, watermark: int = 0, part: Any = PART) -> Patch:
    rectangle = part_rectangle(part, start, end)
    size = rectangle.layers * rectangle.tokens * 2 * rectangle.heads * HEAD_DIM * 4
    return Patch("t", watermark, generation, rectangle, memoryview(bytearray(size)), 0)


def test_what_is_applied_counts_without_gaps() -> None:
    sink, applied = receiver()
    for (start, end), expected in {(4, 6): 6, (8, 9): 6, (6, 8): 8, (5, 7): 8, (9, 9): 8, (8, 12): 12}.items():
        sink.apply(patch(start, end))
        assert applied == {0: expected}


def test_another_generation_starts_anew() -> None:
    sink, applied = receiver()
    sink.apply(patch(4, 9, watermark=9))
    sink.apply(patch(4, 6, generation=1))
    assert applied == {0: 6}
    with pytest.raises(ValueError, match="older"):
        sink.apply(patch(6, 8, generation=0, watermark=9))
    sink.apply(patch(6, 8, generation=1, watermark=8))
    with pytest.raises(ValueError, match="older"):
        sink.apply(patch(8, 9, generation=1, watermark=7))


@pytest.mark.parametrize("span", [(3, 5), (4, 13), (11, 13)])
def test_nothing_is_written_outside(span: tuple[int, int]) -> None:
    sink, applied = receiver()
    with pytest.raises(ValueError, match="reservation"):
        sink.apply(patch(*span))
    assert applied == {}


def test_nothing_of_other_layers_or_another_size() -> None:
    sink, applied = receiver()
    other = wire_moves.PairPart(pair=0, rank=0, transfer_id="t", layer_start=0, layer_end=1, head_start=0, head_end=2)
    with pytest.raises(ValueError, match="layers and heads"):
        sink.apply(patch(4, 5, part=other))
    good = patch(4, 6)
    with pytest.raises(ValueError, match="bytes"):
        sink.apply(Patch("t", 0, 0, good.rectangle, good.payload[:-4], 0))
    assert applied == {}


def test_a_pool_of_another_kind_is_told() -> None:
    from meshift.backends.sglang.plugin.kv import _obstacle

    plain = SimpleNamespace(kv_cache_layout="nhd", is_quantized_kv_cache=False, head_dim=4, v_head_dim=4)
    assert _obstacle(plain, 4, 4) == ""
    assert "copies" in _obstacle(plain, 4, 2)
    for changed in ({"kv_cache_layout": "hnd"}, {"is_quantized_kv_cache": True}, {"v_head_dim": 8}):
        assert _obstacle(SimpleNamespace(**{**vars(plain), **changed}), 4, 4) != ""
