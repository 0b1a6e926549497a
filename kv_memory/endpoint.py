"""The two ends of a pair transfer on its ranks: a sender that gathers, a receiver that scatters.

    KvSource --gather--> KvSender ==Transport==> KvReceiver --scatter--> KvSink

What an engine's KV memory must offer is `KvSource` and `KvSink`, for one request (or, when layers move, for
the slots of the whole pool: the identity as token-to-slot map). Payloads are the rectangle's bytes as
`[layers, tokens, 2, heads, head_dim]`, contiguous, K before V; both ends hold the same type of elements.
Gathers and scatters run on the caller's thread and are expected to be short: a patch holds at most
`patch_tokens_max` tokens."""

import asyncio
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from meshift.kv_memory.rectangle import Rectangle
from meshift.kv_memory.transfer import Pair, Reception
from meshift.kv_memory.transport.base import Address, Patch, Transport, TransportError

PATCH_TOKENS_MAX = 2048
"""Tokens of one patch, unless said otherwise; bounds the staging buffer and the time of one gather."""

CHECKSUM_TOKENS = 256
"""Tokens that `rectangle_checksum` reads at a time; part of its definition."""


class KvReader(Protocol):
    """Something whose KV can be read."""

    def gather(self, rectangle: Rectangle) -> bytes | memoryview:
        """The newest values, which must stay as they are while a patch of them is on its way: a reader that
        reuses a staging buffer serves one pair. Raises ValueError outside what this rank owns."""


class KvSource(KvReader, Protocol):
    """The KV of what moves, at a rank that writes it."""

    def generation(self) -> int:
        """Grows when tokens get other slots, or slots other tokens: what was gathered before may be torn."""

    def written(self) -> int:
        """`T_scheduled`: tokens that were written and, where a dirty map is kept, marked."""


class KvSink(KvReader, Protocol):
    """Reserved slots, at a rank that takes it over."""

    def scatter(self, rectangle: Rectangle, payload: bytes | memoryview) -> None:
        """Write the values. Raises ValueError outside what this rank owns, or for another size."""


class GenerationChanged(Exception):
    """The source's pages changed: the round is void, the transfer must restart or abort."""


def rectangle_checksum(kv: KvReader, rectangle: Rectangle) -> int:
    """CRC-32 of the bytes in a rectangle, equal at both ends once nothing is written any more."""
    checksum = 0
    for piece in _pieces(rectangle, [(rectangle.token_start, rectangle.token_end)], CHECKSUM_TOKENS):
        checksum = zlib.crc32(kv.gather(piece), checksum)
    return checksum


@dataclass(frozen=True, slots=True)
class RoundSent:
    """What one round of one pair sent, all of it applied."""

    watermark: int
    patches: int
    byte_count: int


class KvSender:
    """Sends the rounds of one pair, one at a time. `watermark` is what its receiver has applied for
    certain."""

    def __init__(
        self,
        transport: Transport,
        address: Address,
        pair: Pair,
        source: KvSource,
        *,
        patch_tokens_max: int = PATCH_TOKENS_MAX,
    ) -> None:
        self.pair = pair
        self.watermark = 0
        self._transport = transport
        self._address = address
        self._source = source
        self._patch_tokens_max = patch_tokens_max
        self._generation = source.generation()

    def generation_changed(self) -> bool:
        """Whether the source's pages changed since the transfer began or restarted."""
        return self._source.generation() != self._generation

    def restart(self) -> None:
        """Go on with the source's generation of now; what was sent counts for nothing."""
        self._generation = self._source.generation()
        self.watermark = 0

    async def send_round(self, ranges: Sequence[tuple[int, int]], watermark: int, *, timeout_s: float) -> RoundSent:
        """Send the newest values of token ranges [start, end), cut to the pair's; returns when they are
        applied.

        Without anything to send, an empty patch takes the watermark over. Raises GenerationChanged (what
        was sent is void) or TransportError (the pair is broken: abort)."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        pieces = _pieces(self.pair.rectangle, ranges, self._patch_tokens_max) or [_nothing(self.pair.rectangle)]
        byte_count = 0
        for index, piece in enumerate(pieces):
            last = index == len(pieces) - 1
            patch = self._gather(piece, watermark if last else self.watermark)
            byte_count += memoryview(patch.payload).nbytes
            await self._transport.send(self._address, patch, timeout_s=deadline_s - loop.time())
        self.watermark = watermark
        return RoundSent(watermark, len(pieces), byte_count)

    def _gather(self, piece: Rectangle, watermark: int) -> Patch:
        payload = self._source.gather(piece)
        # After the copy: before it, the pages might still change under the gather.
        if self.generation_changed():
            raise GenerationChanged(f"{self._generation} is {self._source.generation()} now")
        checksum = zlib.crc32(payload)
        return Patch(self.pair.transfer_id, watermark, self._generation, piece, payload, checksum)


class KvReceiver:
    """Takes the patches of one pair and writes them into reserved slots, between `open` and `close`."""

    def __init__(self, transport: Transport, pair: Pair, sink: KvSink) -> None:
        self.pair = pair
        self._transport = transport
        self._sink = sink
        self._reception = Reception(pair)
        self._open = False
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    @property
    def applied(self) -> int:
        """`T_applied`, in the newest generation."""
        return self._reception.applied

    def open(self) -> Address:
        """Receive from now on. Raises TransportError or ValueError, as `open_transfer`."""
        address = self._transport.open_transfer(self.pair.transfer_id, self._apply)
        self._open = True
        return address

    def close(self) -> None:
        """Write nothing any more: when it returns, the slots are free for anything. Idempotent."""
        if self._open:
            self._transport.close_transfer(self.pair.transfer_id)
        self._open = False
        for _, waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(TransportError(f"transfer {self.pair.transfer_id} is closed"))

    def covers(self, start: int, end: int) -> bool:
        """Whether all KV of tokens [start, end) was written in the newest generation."""
        return self._reception.covers(start, end)

    def checksum(self, start: int, end: int) -> int:
        """`rectangle_checksum` of tokens [start, end) of the pair, read back from the slots."""
        return rectangle_checksum(self._sink, _between(self.pair.rectangle, start, end))

    async def wait_applied(self, watermark: int, *, timeout_s: float) -> None:
        """Return when `applied` has reached the watermark. Raises TransportError at the deadline or when
        closed."""
        if self.applied >= watermark:
            return
        if not self._open:
            raise TransportError(f"transfer {self.pair.transfer_id} is closed")
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        late = TransportError(f"{self.pair.transfer_id} did not reach {watermark} within {timeout_s} s")
        timer = loop.call_later(timeout_s, _fail, waiter, late)
        self._waiting.append((watermark, waiter))
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiting.remove((watermark, waiter))

    def _apply(self, patch: Patch) -> None:
        self._reception.accept(patch)
        if not patch.rectangle.empty:
            self._sink.scatter(patch.rectangle, patch.payload)
        self._reception.record(patch)
        for watermark, waiter in self._waiting:
            if watermark <= self.applied and not waiter.done():
                waiter.set_result(None)


def _fail(waiter: "asyncio.Future[None]", error: TransportError) -> None:
    if not waiter.done():
        waiter.set_exception(error)


def _between(whole: Rectangle, start: int, end: int) -> Rectangle:
    """The part of `whole` in tokens [start, end)."""
    wanted = Rectangle(whole.layer_start, whole.layer_end, start, end, whole.head_start, whole.head_end)
    return whole.intersect(wanted)


def _nothing(whole: Rectangle) -> Rectangle:
    return _between(whole, whole.token_start, whole.token_start)


def _pieces(whole: Rectangle, ranges: Sequence[tuple[int, int]], tokens_max: int) -> list[Rectangle]:
    """The ranges as parts of `whole`, none empty, none longer than `tokens_max`."""
    pieces = []
    for start, end in ranges:
        part = _between(whole, start, end)
        for low in range(part.token_start, part.token_end, tokens_max):
            pieces.append(_between(part, low, min(low + tokens_max, part.token_end)))
    return [piece for piece in pieces if not piece.empty]
