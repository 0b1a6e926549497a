"""Gathers a request's KV into patches, piece by piece, and hands them to the data thread."""

import time
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch

from meshift.backends.sglang import wire_moves as wire
from meshift.backends.sglang.plugin.data_plane import DataPlane, Round
from meshift.backends.sglang.plugin.kv import RankKv
from meshift.kv_memory.endpoint import KvReader, rectangle_checksum
from meshift.kv_memory.rectangle import Rectangle
from meshift.kv_memory.transport.base import Address, Patch

GATHER_TOKENS_MAX = 512
"""Gathered of one move at one step boundary, so that a long request's copy doesn't hold up the others' steps."""

GATHERED_BYTES_MAX = 256 * 1024 * 1024
"""Gathered and not yet applied, of one round; the rest waits for a later boundary."""


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
        slots = self._slots[rectangle.token_start - self._first : rectangle.token_end - self._first]
        return self._kv.gather(rectangle, slots)

    def hashes(self, parts: Sequence[wire.PairPart], start: int, end: int) -> list[wire.PairHash]:
        """Of tokens [start, end) of each part."""
        return [
            wire.PairHash(pair=part.pair, checksum=rectangle_checksum(self, part_rectangle(part, start, end)))
            for part in parts
        ]


class Copy:
    """One round: tokens [start, end) of a request, to all its targets that this rank has a part in."""

    def __init__(self, targets: Sequence[wire.PairTarget], rank: int, generation: int, span: tuple[int, int]) -> None:
        self.start, self.end = span
        self.next = self.start
        self.gather_ns = 0
        self._generation = generation
        self._targets = [target for target in targets if target.part.rank == rank]

    def gather_piece(self, reader: RowReader, data: DataPlane, round_: Round, tokens_max: int) -> bool:
        """Gather and hand over the next piece; whether that was the last."""
        if round_.pending_bytes > GATHERED_BYTES_MAX:
            return False
        begun_ns = time.monotonic_ns()
        low, self.next = self.next, min(self.next + tokens_max, self.end)
        is_last = self.next >= self.end
        for target in self._targets if self.next > low else ():
            rectangle = part_rectangle(target.part, low, self.next)
            payload = reader.gather(rectangle)
            # Only what ends a round promises more than the round before did.
            watermark = self.end if is_last else self.start
            patch = Patch(target.part.transfer_id, watermark, self._generation, rectangle, payload, crc32(payload))
            data.send(round_, _address(target.address), patch)
        self.gather_ns += time.monotonic_ns() - begun_ns
        if is_last:
            data.finish(round_)
        return is_last


def row_reader(kv: RankKv, scheduler: Any, req: Any) -> RowReader:
    """Of a request with a row."""
    row = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : req.kv.kv_allocated_len]
    return RowReader(kv, row.to(torch.int64))


def _address(address: wire.TargetAddress) -> Address:
    return Address(address.scheme, address.location, address.rank, address.token)
