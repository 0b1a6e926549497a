"""Copies a request's KV into patches, piece by piece, and has them sent.

On a CPU the pieces are gathered on the data thread, each when the link is about to want it: the step thread hands over
where the tokens lie, and looks, when all is gathered, whether they lay there all the time (`moves_out`). What was read
of pages that were given away meanwhile is void then; to read them does no harm, since the pool's addresses stay valid.
"""

import logging
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from meshift.backends.sglang import wire_moves as wire
from meshift.backends.sglang.pairs import from_wire
from meshift.backends.sglang.plugin.data_plane import DataPlane, Round
from meshift.backends.sglang.plugin.kv import RankKv
from meshift.kv_memory.data_thread import CHECKSUM_LATER
from meshift.kv_memory.endpoint import KvReader
from meshift.kv_memory.hashing import kv_hash
from meshift.kv_memory.rectangle import Rectangle
from meshift.kv_memory.staging import StagingBuffer
from meshift.kv_memory.transport.base import Patch

PIECE_BYTES_MAX = 4 << 20
"""Gathered at once: a millisecond's work. Smaller ones would cost more in messages than they bring."""

PIECES_UNDER_WAY_MAX = 3
"""Of one round, gathered and not yet applied: enough for the link never to wait, and no more, so that a copy takes as
little of memory and cores at a time as the link does."""

logger = logging.getLogger(__name__)

_Staged = tuple[wire.PairTarget, Rectangle, StagingBuffer | memoryview]


def part_rectangle(part: wire.PairPart, start: int, end: int) -> Rectangle:
    """Tokens [start, end) of a pair."""
    return Rectangle(part.layer_start, part.layer_end, start, end, part.head_start, part.head_end)


class RowReader(KvReader):
    """Reads the KV of one request, by its row or its reservation: `slots[i]` is where token `first + i` lies."""

    def __init__(self, kv: RankKv, slots: torch.Tensor, first: int = 0) -> None:
        self._kv = kv
        self._slots = slots
        self._first = first

    @property
    def beside_steps(self) -> bool:
        """Whether another thread than that which steps may read."""
        return self._kv.beside_steps

    def gather(self, rectangle: Rectangle) -> memoryview:
        """See `KvReader.gather`."""
        out = memoryview(bytearray(self._kv.byte_count(rectangle)))
        self._kv.gather(rectangle, self._of(rectangle), out)
        return out

    def byte_count(self, part: wire.PairPart, tokens: int) -> int:
        """Of so many tokens of a pair."""
        return self._kv.byte_count(part_rectangle(part, 0, tokens))

    def stage(self, rectangle: Rectangle, data: DataPlane, *, must: bool) -> StagingBuffer | memoryview | None:
        """A copy to be sent, in staging memory. While that is full: None, or, if it `must` be, memory of its own."""
        buffer = data.staging.try_acquire(self._kv.byte_count(rectangle))
        if buffer is None:
            return self.gather(rectangle) if must else None
        try:
            self._kv.gather(rectangle, self._of(rectangle), buffer.view)
        except BaseException:
            buffer.release()
            raise
        return buffer

    def hashes(self, parts: Sequence[wire.PairPart], start: int, end: int) -> list[wire.PairHash]:
        """Of tokens [start, end) of each part."""
        return [wire.PairHash(pair=part.pair, hash=kv_hash(self, part_rectangle(part, start, end))) for part in parts]

    def _of(self, rectangle: Rectangle) -> torch.Tensor:
        return self._slots[rectangle.token_start - self._first : rectangle.token_end - self._first]


class Copy:
    """One round: tokens [start, end) of a request, to all its targets that this rank has a part in."""

    def __init__(self, targets: Sequence[wire.PairTarget], rank: int, generation: int, span: tuple[int, int]) -> None:
        self.start, self.end = span
        self.gathered = False
        """All of it is copied and handed over, or nothing more will be."""
        self.given_up = False
        """Nobody wants the rest."""
        self._next = self.start
        self._generation = generation
        self._targets = [target for target in targets if target.part.rank == rank]
        self._lock = threading.Lock()
        self._under_way = 0

    def begin(self, reader: RowReader, data: DataPlane, round_: Round) -> None:
        """The step thread's: `reader` must stay what it is. Where only that thread may read, `go_on` does the work."""
        self._reader, self._data, self._round = reader, data, round_
        round_.byte_count = sum(reader.byte_count(target.part, self.end - self.start) for target in self._targets)
        round_.begun_ns = time.monotonic_ns()
        if reader.beside_steps:
            data.run(self._advance)

    def go_on(self) -> bool:
        """At each step boundary: a piece, if it must be here; whether all is gathered."""
        if not self._reader.beside_steps and not self.gathered and self._has_room():
            self._take_piece(must=False)
        return self.gathered

    def finish(self) -> None:
        """What is left of a request that stands still: now, where only the step thread may read."""
        if not self._reader.beside_steps:
            while not self.gathered:
                self._take_piece(must=True)

    # ---- inside, on the thread that reads

    def _advance(self) -> None:
        """As many pieces as may be under way. The data thread's."""
        while not self.gathered and self._has_room():
            # With nothing under way nobody would call again when staging memory is free.
            if not self._take_piece(must=not self._under_way):
                return

    def _has_room(self) -> bool:
        return self._under_way < PIECES_UNDER_WAY_MAX

    def _take_piece(self, *, must: bool) -> bool:
        """Gather and hand over the next piece; False if there is no staging memory for it."""
        if self.given_up or self._round.error or self._next >= self.end:
            self._end()
            return True
        begun_ns = time.monotonic_ns()
        end = min(self._next + self._tokens_at_once(), self.end)
        try:
            staged = self._stage(end, must=must)
        except Exception as error:
            logger.exception("KV can't be gathered")
            self._round.error = f"{type(error).__name__}: {error}"
            self._end()
            return True
        self._round.gather_ns += time.monotonic_ns() - begun_ns
        if staged is None:
            return False
        self._post(staged, end)
        if self._next >= self.end:
            self._end()
        return True

    def _end(self) -> None:
        if not self.gathered:
            self.gathered = True
            self._data.finish(self._round)

    def _tokens_at_once(self) -> int:
        token_bytes = sum(self._reader.byte_count(target.part, 1) for target in self._targets)
        return max(1, PIECE_BYTES_MAX // max(1, token_bytes))

    def _stage(self, end: int, *, must: bool) -> list[_Staged] | None:
        """Tokens [next, end) for all targets, or nothing at all."""
        staged: list[_Staged] = []
        for target in self._targets:
            rectangle = part_rectangle(target.part, self._next, end)
            payload = self._reader.stage(rectangle, self._data, must=must)
            if payload is None:
                for _, _, taken in staged:
                    _release(taken)
                return None
            staged.append((target, rectangle, payload))
        return staged

    def _post(self, staged: list[_Staged], end: int) -> None:
        # Only what ends a round promises more than the round before did.
        watermark = self.end if end == self.end else self.start
        self._next = end
        left = len(staged)
        with self._lock:
            self._under_way += bool(left)

        def applied(payload: StagingBuffer | memoryview) -> None:
            nonlocal left
            _release(payload)
            with self._lock:
                left -= 1
                self._under_way -= not left
            if not left and self._reader.beside_steps:
                self._data.run(self._advance)

        for target, rectangle, payload in staged:
            view = payload.view if isinstance(payload, StagingBuffer) else payload
            patch = Patch(target.part.transfer_id, watermark, self._generation, rectangle, view, CHECKSUM_LATER)
            self._data.send(self._round, from_wire(target.address), patch, partial(applied, payload))


def row_reader(kv: RankKv, scheduler: Any, req: Any, start: int = 0, end: int | None = None) -> RowReader:
    """Of tokens [start, end) of a request with a row, as it is now."""
    stop = req.kv.kv_allocated_len if end is None else end
    row = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, start:stop]
    return RowReader(kv, row.to(torch.int64, copy=True), start)


def _release(payload: StagingBuffer | memoryview) -> None:
    if isinstance(payload, StagingBuffer):
        payload.release()
