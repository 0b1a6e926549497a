"""Live copies with a writer that goes on: exact whatever the interleaving, safe whatever breaks."""

import asyncio
import random

import numpy as np
import pytest

from meshift.kv_memory.dirty_map import DirtyMap
from meshift.kv_memory.endpoint import GenerationChanged, KvReceiver, KvSender
from meshift.kv_memory.live_copy import AppendTracker, LiveCopy, SlotTracker
from meshift.kv_memory.matrix import MatrixKv
from meshift.kv_memory.rectangle import Rectangle
from meshift.kv_memory.transfer import (
    ConvergenceRule,
    IllegalTransition,
    Transfer,
    TransferState,
    plan_pairs,
)
from meshift.kv_memory.transport import FaultRates, Link, MemoryFabric, MemoryTransport, TransportError
from tests.unit.kv_memory.virtual_time import run_virtual

SLOTS, LAYERS, HEAD_DIM = 48, 5, 2
STEP_S = 0.015
ROUNDS_MAX = 200


class LayerMove:
    """Layers go from one stage to two others while a writer rewrites any slots: the identity as slot map."""

    def __init__(self, seed: int, *, faults: FaultRates | None = None, gap_max: int = 0) -> None:
        self.rng = random.Random(seed)
        self.gap_max = gap_max
        self.fabric = MemoryFabric(
            link=Link(bandwidth_bytes_per_s=100_000.0, latency_s=0.0002), faults=faults, rng=random.Random(seed)
        )
        whole = Rectangle(0, LAYERS, 0, SLOTS, 0, 1)
        parts = [Rectangle(0, 3, 0, SLOTS, 0, 1), Rectangle(3, LAYERS, 0, SLOTS, 0, 1)]
        self.source = MatrixKv(whole, SLOTS, HEAD_DIM, np.int32)
        self.stages = [MatrixKv(part, SLOTS, HEAD_DIM, np.int32) for part in parts]
        self.pairs = plan_pairs("layers", whole, [whole], parts)
        self.request = self.source.whole()
        self.live: set[int] = set()
        self.scheduled = 0

    async def start(self, rule: ConvergenceRule) -> None:
        ends = [MemoryTransport(self.fabric, where, rank) for where, rank in (("s", 0), ("d", 0), ("d", 1))]
        for end in ends:
            await end.start()
        self.receivers = [KvReceiver(ends[1 + i], pair, self.stages[i].whole()) for i, pair in enumerate(self.pairs)]
        self.senders = [
            KvSender(ends[0], receiver.open(), pair, self.request, patch_tokens_max=5)
            for pair, receiver in zip(self.pairs, self.receivers, strict=True)
        ]
        self.trackers = [
            SlotTracker(
                self.source.dirty,
                pair.transfer_id,
                live_slots=lambda: sorted(self.live),
                written=lambda: self.scheduled,
                gap_max=self.gap_max,
            )
            for pair in self.pairs
        ]
        self.transfer = Transfer(self.pairs, rule)
        self.copy = LiveCopy(self.transfer, self.senders, self.trackers, round_timeout_s=5.0)

    def step(self) -> None:
        """The engine writes some slots: memory, then marks, then the watermark."""
        for slot in self.rng.sample(range(SLOTS), 3):
            self.request.write(slot, self.rng.randbytes(self.source.array[:, 0].nbytes))
            self.live.add(slot)
            self.scheduled += 1

    async def write_for_ever(self) -> None:
        while True:
            self.step()
            await asyncio.sleep(STEP_S * self.rng.random())

    def equal(self) -> bool:
        copied = np.concatenate([stage.array for stage in self.stages])
        live = sorted(self.live)
        return bool(np.array_equal(copied[:, live], self.source.array[:, live]))


async def run_layer_move(move: LayerMove) -> TransferState:
    """Copy live until it has converged, freeze, cut over."""
    for _ in range(30):
        move.step()
    await move.start(ConvergenceRule(tokens_left_max=3))
    writer = asyncio.ensure_future(move.write_for_ever())
    try:
        for _ in range(ROUNDS_MAX):
            if await move.copy.round() is TransferState.CONVERGED:
                break
    except TransportError:
        return move.transfer.state
    finally:
        writer.cancel()
    try:
        await move.copy.cut_over()
    except TransportError:
        return move.transfer.state
    assert move.equal()
    move.transfer.commit()
    return move.transfer.state


@pytest.mark.parametrize("gap_max", [0, 4])
@pytest.mark.parametrize("seed", range(12))
def test_rewritten_slots_arrive_as_they_are_at_the_freeze(seed: int, gap_max: int) -> None:
    move = LayerMove(seed, gap_max=gap_max)
    assert run_virtual(run_layer_move(move)) is TransferState.DONE
    assert move.transfer.rounds >= 2
    assert move.copy.byte_count > 0


@pytest.mark.parametrize("seed", range(12))
def test_faults_abort_or_the_copy_is_exact(seed: int) -> None:
    faults = FaultRates(lost=0.01, corrupted=0.01, duplicated=0.3, acknowledgement_lost=0.01)
    move = LayerMove(seed, faults=faults)
    state = run_virtual(run_layer_move(move))
    assert state in (TransferState.DONE, TransferState.ABORTED), seed
    assert (state is TransferState.ABORTED) == bool(move.transfer.abort_reason), seed


def test_a_broken_pair_lets_the_others_end_and_aborts() -> None:
    move = LayerMove(0)

    async def main() -> None:
        for _ in range(10):
            move.step()
        await move.start(ConvergenceRule(0))
        move.receivers[0].close()
        with pytest.raises(TransportError, match="not open"):
            await move.copy.round()
        other = move.stages[1].array.copy()
        assert np.array_equal(other, move.source.array[3:])
        assert move.transfer.state is TransferState.ABORTED
        assert "not open" in move.transfer.abort_reason
        assert move.copy.byte_count == 0

    run_virtual(main())


def test_cut_over_needs_convergence() -> None:
    move = LayerMove(0)

    async def main() -> None:
        move.step()
        await move.start(ConvergenceRule(0))
        with pytest.raises(IllegalTransition):
            await move.copy.cut_over()
        assert move.transfer.state is TransferState.COPYING

    run_virtual(main())


def test_a_frozen_writer_whose_pages_change_is_aborted() -> None:
    move = LayerMove(0)

    async def main() -> None:
        move.step()
        await move.start(ConvergenceRule(0))
        assert await move.copy.round() is TransferState.CONVERGED
        move.request.relocate(range(SLOTS), SLOTS)
        with pytest.raises(GenerationChanged):
            await move.copy.cut_over()
        assert move.transfer.state is TransferState.ABORTED

    run_virtual(main())


def test_a_restart_copies_all_live_slots_again() -> None:
    move = LayerMove(3)

    async def main() -> None:
        for _ in range(6):
            move.step()
        await move.start(ConvergenceRule(0))
        assert await move.copy.round() is TransferState.CONVERGED
        assert move.equal()
        for stage in move.stages:
            stage.array[...] = 0
        move.request.relocate(range(SLOTS), SLOTS)
        assert await move.copy.round() is TransferState.COPYING
        assert await move.copy.round() is TransferState.CONVERGED
        assert move.equal()

    run_virtual(main())


def test_senders_must_be_the_transfer_s() -> None:
    move = LayerMove(0)

    async def main() -> None:
        await move.start(ConvergenceRule(0))
        for senders, trackers in (
            (move.senders[::-1], move.trackers),
            (move.senders[:1], move.trackers[:1]),
            (move.senders, move.trackers[:1]),
        ):
            with pytest.raises(ValueError, match="in order"):
                LiveCopy(move.transfer, senders, trackers, round_timeout_s=1)

    run_virtual(main())


# ---- trackers ----


def test_append_tracker_gives_each_token_once() -> None:
    kv = MatrixKv(Rectangle(0, 1, 0, 20, 0, 1), 20, 1)
    request = kv.request(range(20))
    tracker = AppendTracker(request, 4)
    request.write(0, bytes(8 * 10))
    first, nothing = tracker.drain(), tracker.drain()
    assert (first.ranges, first.watermark) == ([(4, 10)], 10)
    assert (nothing.ranges, nothing.watermark) == ([], 10)
    request.write(10, bytes(8 * 3))
    assert tracker.drain().ranges == [(10, 13)]
    tracker.restart()
    assert tracker.drain().ranges == [(4, 13)]
    assert tracker.written() == 13


def test_append_tracker_with_all_cached() -> None:
    kv = MatrixKv(Rectangle(0, 1, 0, 20, 0, 1), 20, 1)
    request = kv.request(range(20))
    request.write(0, bytes(8 * 10))
    tracker = AppendTracker(request, 15)
    assert (tracker.drain().ranges, tracker.drain().watermark) == ([], 10)
    request.write(10, bytes(8 * 7))
    assert tracker.drain().ranges == [(15, 17)]


def test_slot_tracker_takes_the_watermark_before_the_slots() -> None:
    """What is written between the two is in the round, and not promised by it."""
    dirty = DirtyMap(8)

    def written() -> int:
        dirty.mark([5])
        return 1

    tracker = SlotTracker(dirty, "pair", live_slots=lambda: [1], written=written)
    drained = tracker.drain()
    assert (drained.watermark, drained.ranges) == (1, [(1, 2), (5, 6)])
    tracker.close()
    tracker.close()
    assert dirty.readers == ()
