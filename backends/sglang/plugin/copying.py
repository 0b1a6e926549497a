"""Gathers a request's KV into patches, piece by piece, and hands them to the data thread."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from meshift.backends.sglang import wire_moves as wire
from meshift.backends.sglang.plugin.data_plane import DataPlane, Round
from meshift.backends.sglang.plugin.kv import RankKv
from meshift.kv_memory.data_thread import CHECKSUM_LATER
from meshift.kv_memory.endpoint import KvReader
from meshift.kv_memory.hashing import kv_hash
from meshift.kv_memory.rectangle import Rectangle
from meshift.kv_memory.staging import StagingBuffer
from meshift.kv_memory.transport.base import Address, Patch

GATHER_BYTES_MAX = 16 << 20
"""Gathered of one move at one step boundary, so that a long request's copy holds up the others' steps by some
milliseconds at most."""

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

    def gather(self, rectangle: Rectangle) -> memoryview:
        """See `KvReader.gather`."""
        out = memoryview(bytearray(self._kv.byte_count(rectangle)))
        self._kv.gather(rectangle, self._of(rectangle), out)
        return out

    def token_bytes(self, part: wire.PairPart) -> int:
        """Of one token of a pair."""
        return self._kv.byte_count(part_rectangle(part, 0, 1))

    def stage(self, rectangle: Rectangle, data: DataPlane, *, must: bool) -> StagingBuffer | memoryview | None:
        """A copy to be sent, in staging memory. While that is full: None, or, if it `must` be, memory of its own."""
        buffer = data.staging.try_acquire(self._kv.byte_count(rectangle))
        if buffer is None:
            return self.gather(rectangle) if must else None
        self._kv.gather(rectangle, self._of(rectangle), buffer.view)
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
        self.next = self.start
        self.gather_ns = 0
        self._generation = generation
        self._targets = [target for target in targets if target.part.rank == rank]

    def gather_piece(self, reader: RowReader, data: DataPlane, round_: Round) -> bool:
        """Gather and hand over the next piece, if there is staging memory; whether that was the last."""
        begun_ns = time.monotonic_ns()
        end = min(self.next + self._tokens_at_once(reader), self.end)
        staged = self._stage(reader, data, end, must=False) if end > self.next else []
        if staged is not None:
            self._post(staged, data, round_, end)
        self.gather_ns += time.monotonic_ns() - begun_ns
        return self._is_done(data, round_)

    def gather_all(self, reader: RowReader, data: DataPlane, round_: Round) -> None:
        """Gather and hand over all that is left."""
        begun_ns = time.monotonic_ns()
        while self.next < self.end:
            end = min(self.next + self._tokens_at_once(reader), self.end)
            staged = self._stage(reader, data, end, must=True)
            assert staged is not None
            self._post(staged, data, round_, end)
        self.gather_ns += time.monotonic_ns() - begun_ns
        self._is_done(data, round_)

    def _tokens_at_once(self, reader: RowReader) -> int:
        token_bytes = sum(reader.token_bytes(target.part) for target in self._targets)
        return max(1, GATHER_BYTES_MAX // max(1, token_bytes))

    def _is_done(self, data: DataPlane, round_: Round) -> bool:
        if self.next < self.end:
            return False
        data.finish(round_)
        return True

    def _stage(self, reader: RowReader, data: DataPlane, end: int, *, must: bool) -> list[_Staged] | None:
        """Tokens [next, end) for all targets, or nothing at all."""
        staged: list[_Staged] = []
        for target in self._targets:
            rectangle = part_rectangle(target.part, self.next, end)
            payload = reader.stage(rectangle, data, must=must)
            if payload is None:
                for _, _, taken in staged:
                    _release(taken)
                return None
            staged.append((target, rectangle, payload))
        return staged

    def _post(self, staged: list[_Staged], data: DataPlane, round_: Round, end: int) -> None:
        # Only what ends a round promises more than the round before did.
        watermark = self.end if end == self.end else self.start
        self.next = end
        for target, rectangle, payload in staged:
            view = payload.view if isinstance(payload, StagingBuffer) else payload
            patch = Patch(target.part.transfer_id, watermark, self._generation, rectangle, view, CHECKSUM_LATER)
            data.send(round_, _address(target.address), patch, partial(_release, payload))


def row_reader(kv: RankKv, scheduler: Any, req: Any) -> RowReader:
    """Of a request with a row."""
    row = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : req.kv.kv_allocated_len]
    return RowReader(kv, row.to(torch.int64))


def _address(address: wire.TargetAddress) -> Address:
    return Address(address.scheme, address.location, address.rank, address.token)


def _release(payload: StagingBuffer | memoryview) -> None:
    if isinstance(payload, StagingBuffer):
        payload.release()
