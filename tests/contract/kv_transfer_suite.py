"""What every KV memory must do as source and sink of transfers.

A test class inherits `KvTransferSuite`, sets `row_bytes` and implements `make_rank`. Content is random
bytes, so that whatever the type of the elements, only an exact copy passes."""

import asyncio
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from meshift.kv_memory.endpoint import KvReceiver, KvSender, KvSink, KvSource, rectangle_checksum
from meshift.kv_memory.layout import Range, rank_rectangles, split_evenly
from meshift.kv_memory.live_copy import AppendTracker, LiveCopy
from meshift.kv_memory.rectangle import Rectangle
from meshift.kv_memory.transfer import (
    ConvergenceRule,
    IllegalTransition,
    Pair,
    Transfer,
    TransferState,
    plan_pairs,
)
from meshift.kv_memory.transport import MemoryFabric, MemoryTransport, Patch, TransportError

TIMEOUT_S = 10.0
SLOTS = 96
LAYERS, HEADS = 6, 4

Bytes = NDArray[np.uint8]
"""[layers, tokens, 2, heads, row_bytes]"""


class KvRequest(KvSource, KvSink, Protocol):
    """One request's KV on one rank, with what an engine does to it."""

    def write(self, start: int, payload: bytes) -> None:
        """The engine writes tokens from `start` on, all layers and heads of the rank; `written()` grows to
        them."""

    def relocate(self, slots: Sequence[int], written: int = 0) -> None:
        """Retracted and admitted again in other slots, where `written` tokens have KV: a new generation."""


class KvRank(Protocol):
    """One rank's KV memory."""

    def request(self, slots: Sequence[int]) -> KvRequest:
        """A request whose token i lives in `slots[i]`."""


@dataclass(frozen=True)
class Layout:
    """How an instance is cut."""

    stages: Sequence[Range]
    tensor_ranks: int

    def rectangles(self, tokens: int) -> list[Rectangle]:
        return rank_rectangles(self.stages, split_evenly(HEADS, self.tensor_ranks), tokens)

    def __str__(self) -> str:
        return f"pp{len(self.stages)}tp{self.tensor_ranks}"


PP1, PP2, PP3 = [(0, LAYERS)], [(0, 4), (4, LAYERS)], [(0, 1), (1, 1), (1, LAYERS)]
LAYOUTS = [
    (Layout(PP1, 1), Layout(PP1, 1)),
    (Layout(PP2, 1), Layout(PP1, 1)),
    (Layout(PP1, 1), Layout(PP2, 1)),
    (Layout(PP1, 2), Layout(PP1, 1)),
    (Layout(PP1, 1), Layout(PP1, 4)),
    (Layout(PP2, 2), Layout(PP3, 4)),
    (Layout(PP3, 3), Layout(PP2, 2)),
]


class Instance:
    """The ranks of one instance, and one request on them."""

    def __init__(self, suite: "KvTransferSuite", layout: Layout, slots: Sequence[int]) -> None:
        self.rectangles = layout.rectangles(len(slots))
        self.ranks = [suite.make_rank(owned, SLOTS) for owned in self.rectangles]
        self.requests = [rank.request(slots) for rank in self.ranks]

    def write(self, start: int, content: Bytes) -> None:
        """One or more steps: tokens from `start` on, whose content is the whole model's."""
        for owned, request in zip(self.rectangles, self.requests, strict=True):
            layers = slice(owned.layer_start, owned.layer_end)
            heads = slice(owned.head_start, owned.head_end)
            if owned.layers:
                request.write(start, content[layers, :, :, heads].tobytes())

    def relocate(self, slots: Sequence[int], written: int) -> None:
        for request in self.requests:
            request.relocate(slots, written)

    def read(self, tokens: int) -> Bytes:
        """What the ranks hold of the first tokens, put together."""
        parts = [
            (owned, request.gather(Rectangle(
                owned.layer_start, owned.layer_end, 0, tokens, owned.head_start, owned.head_end
            )))
            for owned, request in zip(self.rectangles, self.requests, strict=True)
            if owned.layers
        ]  # fmt: skip
        row_bytes = len(parts[0][1]) // (parts[0][0].layers * tokens * 2 * parts[0][0].heads)
        whole = np.zeros((LAYERS, tokens, 2, HEADS, row_bytes), np.uint8)
        for owned, payload in parts:
            shape = (owned.layers, tokens, 2, owned.heads, row_bytes)
            layers = slice(owned.layer_start, owned.layer_end)
            heads = slice(owned.head_start, owned.head_end)
            whole[layers, :, :, heads] = np.frombuffer(payload, np.uint8).reshape(shape)
        return whole


class Move:
    """A transfer of one request between two instances, over a memory transport, ready to go."""

    def __init__(self, source: Instance, destination: Instance, pairs: list[Pair]) -> None:
        self.source, self.destination, self.pairs = source, destination, pairs
        self.fabric = MemoryFabric()
        self.source_ends = [MemoryTransport(self.fabric, "s", i) for i in range(len(source.ranks))]
        self.destination_ends = [MemoryTransport(self.fabric, "d", i) for i in range(len(destination.ranks))]

    async def start(self, rule: ConvergenceRule, patch_tokens_max: int) -> None:
        for end in [*self.source_ends, *self.destination_ends]:
            await end.start()
        self.receivers = [
            KvReceiver(self.destination_ends[p.destination], p, self.destination.requests[p.destination])
            for p in self.pairs
        ]
        self.senders = [
            KvSender(
                self.source_ends[pair.source],
                receiver.open(),
                pair,
                self.source.requests[pair.source],
                patch_tokens_max=patch_tokens_max,
            )
            for pair, receiver in zip(self.pairs, self.receivers, strict=True)
        ]
        trackers = [AppendTracker(self.source.requests[pair.source]) for pair in self.pairs]
        self.transfer = Transfer(self.pairs, rule)
        self.copy = LiveCopy(self.transfer, self.senders, trackers, round_timeout_s=TIMEOUT_S)

    def abort(self) -> None:
        self.transfer.abort("test")
        for receiver in self.receivers:
            receiver.close()

    async def finish(self) -> None:
        """Cut over and commit, and check that both ends hold the same."""
        await self.copy.cut_over()
        tokens = self.transfer.scheduled
        for pair, receiver in zip(self.pairs, self.receivers, strict=True):
            await receiver.wait_applied(tokens, timeout_s=TIMEOUT_S)
            assert receiver.covers(0, tokens)
            source = self.source.requests[pair.source]
            rectangle = pair.rectangle.intersect(Rectangle(0, LAYERS, 0, tokens, 0, HEADS))
            assert rectangle_checksum(source, rectangle) == receiver.checksum(0, tokens)
            receiver.close()
        self.transfer.commit()


class KvTransferSuite:
    """Inherit, set `row_bytes` and implement `make_rank`."""

    row_bytes: int
    """Bytes of one head's K (or V) of one token and layer."""

    def make_rank(self, owned: Rectangle, slots: int) -> KvRank:
        """A rank that owns the layers and heads of `owned`, with that many slots, all zero. It may own
        nothing."""
        raise NotImplementedError

    @pytest.fixture(params=[1, 2])
    def rng(self, request: pytest.FixtureRequest) -> random.Random:
        print("seed", request.param)
        return random.Random(request.param)

    # ---- helpers ----

    def content(self, rng: random.Random, layers: int, tokens: int, heads: int) -> Bytes:
        shape = (layers, tokens, 2, heads, self.row_bytes)
        size = int(np.prod(shape))
        return np.frombuffer(rng.randbytes(size), np.uint8).reshape(shape)

    def slots(self, rng: random.Random, tokens: int) -> list[int]:
        return rng.sample(range(SLOTS), tokens)

    def one_rank(self, rng: random.Random, tokens: int) -> tuple[KvRequest, Bytes, Rectangle]:
        """A request of a rank that owns layers 2-5 and heads 1-3, all written."""
        owned = Rectangle(2, 6, 0, tokens, 1, 4)
        request = self.make_rank(owned, SLOTS).request(self.slots(rng, tokens))
        content = self.content(rng, owned.layers, tokens, owned.heads)
        request.write(0, content.tobytes())
        return request, content, owned

    async def make_move(
        self,
        rng: random.Random,
        layouts: tuple[Layout, Layout] = LAYOUTS[1],
        *,
        tokens_max: int = 40,
        rule: ConvergenceRule | None = None,
        patch_tokens_max: int = 7,
    ) -> Move:
        source, destination = (Instance(self, layout, self.slots(rng, tokens_max)) for layout in layouts)
        whole = Rectangle(0, LAYERS, 0, tokens_max, 0, HEADS)
        pairs = plan_pairs("move", whole, source.rectangles, destination.rectangles)
        move = Move(source, destination, pairs)
        await move.start(rule or ConvergenceRule(tokens_left_max=2), patch_tokens_max)
        return move

    # ---- gather and scatter ----

    def test_gather_gives_what_was_written(self, rng: random.Random) -> None:
        request, content, owned = self.one_rank(rng, 20)
        assert bytes(request.gather(owned)) == content.tobytes()
        assert request.written() == 20

    def test_partial_rectangles(self, rng: random.Random) -> None:
        request, content, owned = self.one_rank(rng, 20)
        for _ in range(40):
            layers = sorted(rng.choices(range(2, 7), k=2))
            tokens = sorted(rng.choices(range(21), k=2))
            heads = sorted(rng.choices(range(1, 5), k=2))
            part = content[layers[0] - 2 : layers[1] - 2, slice(*tokens), :, heads[0] - 1 : heads[1] - 1]
            rectangle = Rectangle(layers[0], layers[1], tokens[0], tokens[1], heads[0], heads[1])
            assert bytes(request.gather(rectangle)) == part.tobytes(), rectangle
        assert bytes(request.gather(owned)) == content.tobytes()

    def test_round_trip_into_other_slots(self, rng: random.Random) -> None:
        request, content, owned = self.one_rank(rng, 20)
        other = self.make_rank(owned, SLOTS).request(self.slots(rng, 20))
        other.scatter(owned, request.gather(owned))
        assert bytes(other.gather(owned)) == content.tobytes()
        assert rectangle_checksum(other, owned) == rectangle_checksum(request, owned)

    def test_scatter_takes_a_memoryview_and_touches_its_cells_alone(self, rng: random.Random) -> None:
        owned = Rectangle(2, 6, 0, SLOTS, 1, 4)
        everything = self.make_rank(owned, SLOTS).request(self.slots(rng, SLOTS))
        before = self.content(rng, 4, SLOTS, 3)
        everything.write(0, before.tobytes())
        part = Rectangle(3, 5, 10, 23, 2, 4)
        new = self.content(rng, 2, 13, 2)
        everything.scatter(part, memoryview(bytearray(new.tobytes())))
        expected = before.copy()
        expected[1:3, 10:23, :, 1:3] = new
        assert bytes(everything.gather(owned)) == expected.tobytes()

    def test_gather_is_a_copy(self, rng: random.Random) -> None:
        request, content, owned = self.one_rank(rng, 20)
        payload = bytes(request.gather(owned))
        request.write(0, bytes(content.nbytes))
        assert payload == content.tobytes()
        assert bytes(request.gather(owned)) == bytes(content.nbytes)

    @pytest.mark.parametrize(
        "outside",
        [
            Rectangle(1, 6, 0, 20, 1, 4),
            Rectangle(2, 7, 0, 20, 1, 4),
            Rectangle(2, 6, 0, 21, 1, 4),
            Rectangle(2, 6, 0, 20, 0, 4),
            Rectangle(2, 6, 0, 20, 1, 5),
        ],
    )
    def test_outside_is_refused(self, rng: random.Random, outside: Rectangle) -> None:
        request, content, owned = self.one_rank(rng, 20)
        with pytest.raises(ValueError, match=r".+"):
            request.gather(outside)
        size = outside.layers * outside.tokens * outside.heads * 2 * self.row_bytes
        with pytest.raises(ValueError, match=r".+"):
            request.scatter(outside, bytes(size))
        assert bytes(request.gather(owned)) == content.tobytes()

    def test_wrong_size_is_refused(self, rng: random.Random) -> None:
        request, content, owned = self.one_rank(rng, 20)
        for size in (0, self.row_bytes, content.nbytes - self.row_bytes, content.nbytes * 2):
            with pytest.raises(ValueError, match=r".+"):
                request.scatter(owned, bytes(size))
        assert bytes(request.gather(owned)) == content.tobytes()

    def test_written_grows_and_rewriting_keeps_it(self, rng: random.Random) -> None:
        request, content, _ = self.one_rank(rng, 20)
        request.write(3, np.ascontiguousarray(content[:, :2]).tobytes())
        assert request.written() == 20

    def test_relocation_is_a_new_generation(self, rng: random.Random) -> None:
        request, _, _ = self.one_rank(rng, 20)
        before = request.generation()
        request.relocate(self.slots(rng, 20), 5)
        assert request.generation() > before
        assert request.written() == 5

    # ---- transfers ----

    @pytest.mark.parametrize("layouts", LAYOUTS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
    async def test_live_move_between_layouts(self, rng: random.Random, layouts: tuple[Layout, Layout]) -> None:
        move = await self.make_move(rng, layouts)
        content = self.content(rng, LAYERS, 40, HEADS)
        move.source.write(0, content[:, :25])
        written, state = 25, TransferState.COPYING
        while state is TransferState.COPYING:
            round_ = asyncio.ensure_future(move.copy.round())
            await asyncio.sleep(0)
            if written < 40:
                move.source.write(written, content[:, written : written + 3])
                written += 3
            state = await round_
        assert state is TransferState.CONVERGED
        await move.finish()
        assert move.transfer.state is TransferState.DONE
        assert np.array_equal(move.destination.read(written), content[:, :written])

    async def test_blocking_copy(self, rng: random.Random) -> None:
        move = await self.make_move(rng, rule=ConvergenceRule(0, rounds_min=0, rounds_max=0))
        content = self.content(rng, LAYERS, 30, HEADS)
        move.source.write(0, content)
        await move.finish()
        assert np.array_equal(move.destination.read(30), content)

    async def test_cached_prefix_is_not_sent(self, rng: random.Random) -> None:
        move = await self.make_move(rng, rule=ConvergenceRule(0, rounds_min=0, rounds_max=0))
        content = self.content(rng, LAYERS, 30, HEADS)
        move.source.write(0, content)
        move.destination.write(0, content[:, :16])
        trackers = [AppendTracker(move.source.requests[pair.source], 16) for pair in move.pairs]
        copy = LiveCopy(move.transfer, move.senders, trackers, round_timeout_s=TIMEOUT_S)
        await copy.cut_over()
        assert copy.byte_count == content[:, 16:].nbytes
        assert all(r.covers(16, 30) and not r.covers(15, 30) for r in move.receivers)
        assert np.array_equal(move.destination.read(30), content)

    async def test_patch_rewrites(self, rng: random.Random) -> None:
        move = await self.make_move(rng, LAYOUTS[0])
        content = self.content(rng, LAYERS, 12, HEADS)
        move.source.write(0, content)
        sender, receiver = move.senders[0], move.receivers[0]
        await sender.send_round([(0, 12)], 12, timeout_s=TIMEOUT_S)
        newer = self.content(rng, LAYERS, 4, HEADS)
        move.source.write(3, newer)
        await sender.send_round([(3, 7)], 12, timeout_s=TIMEOUT_S)
        assert np.array_equal(move.destination.read(12)[:, 3:7], newer)
        assert np.array_equal(move.destination.read(12)[:, :3], content[:, :3])
        assert receiver.applied == 12

    async def test_changed_generation_voids_the_round_and_the_restart_is_exact(self, rng: random.Random) -> None:
        move = await self.make_move(rng, patch_tokens_max=3)
        before = self.content(rng, LAYERS, 20, HEADS)
        after = self.content(rng, LAYERS, 20, HEADS)
        move.source.write(0, before)
        round_ = asyncio.ensure_future(move.copy.round())
        for _ in range(3):
            await asyncio.sleep(0)
        move.source.relocate(self.slots(rng, 40), 0)
        move.source.write(0, after[:, :15])
        assert await round_ is TransferState.COPYING
        assert move.transfer.restarts == 1
        assert move.transfer.applied == 0
        assert await move.copy.round() is TransferState.CONVERGED
        move.source.write(15, after[:, 15:])
        await move.finish()
        assert np.array_equal(move.destination.read(20), after)

    async def test_too_many_generations_abort(self, rng: random.Random) -> None:
        move = await self.make_move(rng)
        content = self.content(rng, LAYERS, 20, HEADS)
        for expected in (TransferState.COPYING, TransferState.ABORTED):
            move.source.relocate(self.slots(rng, 40), 0)
            move.source.write(0, content)
            assert await move.copy.round() is expected
        assert "changed 2 times" in move.transfer.abort_reason

    # ---- what a receiver refuses ----

    def patch(self, pair: Pair, tokens: Range, watermark: int, generation: int, fill: bytes) -> Patch:
        whole = pair.rectangle
        rectangle = whole.intersect(
            Rectangle(whole.layer_start, whole.layer_end, *tokens, whole.head_start, whole.head_end)
        )
        payload = fill * (rectangle.layers * rectangle.tokens * rectangle.heads * 2 * self.row_bytes)
        return Patch(pair.transfer_id, watermark, generation, rectangle, payload, zlib.crc32(payload))

    @pytest.mark.parametrize(
        ("watermark", "generation", "refused"),
        [(7, 4, "watermark 7"), (20, 3, "generation 3"), (8, 4, ""), (0, 5, "")],
    )
    async def test_old_patches_are_refused(
        self, rng: random.Random, watermark: int, generation: int, refused: str
    ) -> None:
        move = await self.make_move(rng, LAYOUTS[0])
        receiver, pair = move.receivers[0], move.pairs[0]
        address = move.senders[0]._address
        first = self.patch(pair, (0, 8), 8, 4, b"\x11")
        await move.source_ends[0].send(address, first, timeout_s=TIMEOUT_S)
        second = self.patch(pair, (0, 2), watermark, generation, b"\x22")
        send = move.source_ends[0].send(address, second, timeout_s=TIMEOUT_S)
        if not refused:
            await send
            assert receiver.applied == watermark
            return
        with pytest.raises(TransportError, match=refused):
            await send
        assert receiver.applied == 8
        assert bytes(move.destination.requests[0].gather(first.rectangle)) == first.payload

    async def test_new_generation_covers_nothing_of_the_old(self, rng: random.Random) -> None:
        move = await self.make_move(rng, LAYOUTS[0])
        receiver, pair = move.receivers[0], move.pairs[0]
        address = move.senders[0]._address
        for tokens, watermark, generation in (((0, 8), 8, 0), ((0, 3), 0, 1)):
            patch = self.patch(pair, tokens, watermark, generation, b"\x33")
            await move.source_ends[0].send(address, patch, timeout_s=TIMEOUT_S)
        assert (receiver.applied, receiver.covers(0, 3), receiver.covers(0, 8)) == (0, True, False)

    # ---- abort ----

    async def reach(self, move: Move, state: TransferState) -> None:
        """Drive a move into a state."""
        if state is TransferState.COPYING:
            return
        assert await move.copy.round() is TransferState.CONVERGED
        if state is TransferState.CUTOVER:
            await move.copy.cut_over()
        assert move.transfer.state is state

    @pytest.mark.parametrize("state", [TransferState.COPYING, TransferState.CONVERGED, TransferState.CUTOVER])
    async def test_abort_leaves_the_slots_free_for_others(self, rng: random.Random, state: TransferState) -> None:
        move = await self.make_move(rng, LAYOUTS[1])
        content = self.content(rng, LAYERS, 30, HEADS)
        move.source.write(0, content)
        await self.reach(move, state)
        late = [asyncio.ensure_future(sender.send_round([(0, 30)], 30, timeout_s=TIMEOUT_S)) for sender in move.senders]
        await asyncio.sleep(0)
        move.abort()
        move.abort()
        others = self.content(rng, LAYERS, 30, HEADS)
        move.destination.write(0, others)
        results: list[Any] = await asyncio.gather(*late, return_exceptions=True)
        assert all(isinstance(result, TransportError) for result in results)
        assert np.array_equal(move.destination.read(30), others)
        with pytest.raises(IllegalTransition):
            move.transfer.commit()

    async def test_source_goes_on_after_an_abort(self, rng: random.Random) -> None:
        move = await self.make_move(rng)
        content = self.content(rng, LAYERS, 30, HEADS)
        move.source.write(0, content[:, :20])
        await move.copy.round()
        move.abort()
        move.source.write(20, content[:, 20:])
        assert np.array_equal(move.source.read(30), content)
