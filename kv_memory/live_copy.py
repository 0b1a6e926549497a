"""Drives one transfer at its sending end: live rounds, the freeze, the last patches.

What has to be copied in a round comes from a tracker. A request's KV only grows, so `AppendTracker` needs
nothing but how far it got; slots that are written again and again, as those of a moving layer, need a
`DirtyMap`: `SlotTracker`.

    copy = LiveCopy(Transfer(pairs, rule), senders, trackers, round_timeout_s=...)
    while await copy.round() is TransferState.COPYING:
        pass                                # the writer goes on meanwhile
    ...                                     # stop the writer, if the state is CONVERGED
    await copy.cut_over()                   # every pair has applied everything when this returns
    ...                                     # the destination takes over
    copy.transfer.commit()                  # or copy.transfer.abort(reason), at any time before
"""

import asyncio
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from numpy.typing import ArrayLike

from meshift.kv_memory.dirty_map import DirtyMap, slot_ranges
from meshift.kv_memory.endpoint import GenerationChanged, KvSender, KvSource
from meshift.kv_memory.transfer import Transfer, TransferState


@dataclass(frozen=True, slots=True)
class Drained:
    """What one round of one pair has to send."""

    ranges: Sequence[tuple[int, int]]
    """Token ranges [start, end); slots, where the map from tokens to slots is the identity."""
    watermark: int
    """`T_scheduled` at the drain: all writes up to it are in this round or in an earlier one."""


class DirtyTracker(Protocol):
    """Knows what one pair has not sent yet."""

    def written(self) -> int:
        """`T_scheduled` now."""

    def drain(self) -> Drained:
        """What is to be sent; it counts as sent from now on, so that later writes come up again."""

    def restart(self) -> None:
        """Everything is to be sent again."""


class AppendTracker:
    """For a request: each token's KV is written once, in order."""

    def __init__(self, source: KvSource, start: int = 0) -> None:
        """`start`: leading tokens that the destination has already."""
        self._source = source
        self._start = start
        self._sent = start

    def written(self) -> int:
        """`T_scheduled` now."""
        return self._source.written()

    def drain(self) -> Drained:
        """The tokens since the last drain."""
        start, end = self._sent, self._source.written()
        self._sent = max(start, end)
        return Drained([(start, end)] if end > start else [], end)

    def restart(self) -> None:
        """Begin at `start` again."""
        self._sent = self._start


class SlotTracker:
    """For moving layers: any slot may be written at any time. One reader of the source's `DirtyMap`."""

    def __init__(
        self,
        dirty: DirtyMap,
        reader: Hashable,
        *,
        live_slots: Callable[[], ArrayLike],
        written: Callable[[], int],
        gap_max: int = 0,
    ) -> None:
        """`live_slots`: those that hold anything, the first round. `written`: `T_scheduled`, which the
        writer raises after it has marked. `gap_max`: see `slot_ranges`. To be made, and closed, on the
        writer's thread."""
        self._dirty = dirty
        self._reader = reader
        self._live_slots = live_slots
        self._written = written
        self._gap_max = gap_max
        dirty.add_reader(reader, live_slots())

    def written(self) -> int:
        """`T_scheduled` now."""
        return self._written()

    def drain(self) -> Drained:
        """The slots since the last drain."""
        # The watermark first: what is written in between is in the round without being promised by it.
        watermark = self._written()
        return Drained(slot_ranges(self._dirty.swap(self._reader), self._gap_max), watermark)

    def restart(self) -> None:
        """All live slots again."""
        self._dirty.mark_for(self._reader, self._live_slots())

    def close(self) -> None:
        """Stop tracking. Idempotent."""
        self._dirty.remove_reader(self._reader)


class LiveCopy:
    """One transfer with its pairs: `senders[i]` and `trackers[i]` belong to `transfer.pairs[i]`.

    The pairs of a round go side by side, and all have ended when a method returns or raises. One call at a
    time; one that is cancelled has broken the transfer, which its caller aborts."""

    def __init__(
        self,
        transfer: Transfer,
        senders: Sequence[KvSender],
        trackers: Sequence[DirtyTracker],
        *,
        round_timeout_s: float,
    ) -> None:
        if [sender.pair for sender in senders] != list(transfer.pairs) or len(trackers) != len(senders):
            raise ValueError("senders and trackers must be those of the transfer's pairs, in order")
        self.transfer = transfer
        self.byte_count = 0
        """Payload bytes that were sent in rounds that ended well."""
        self._senders = tuple(senders)
        self._trackers = tuple(trackers)
        self._round_timeout_s = round_timeout_s

    async def round(self) -> TransferState:
        """One live round, and what it leads to: COPYING (again), CONVERGED (the writer may be frozen), or
        ABORTED (the pages changed too often). Raises TransportError, the transfer being aborted then."""
        if not self._changed():
            try:
                await self._send_drained()
            except GenerationChanged:
                return self._restart()
        if self._changed():
            return self._restart()
        self.transfer.observe_written(self._written())
        return self.transfer.finish_round()

    async def cut_over(self) -> None:
        """The writer has stopped: send the rest. All pairs have applied everything when it returns.

        Raises IllegalTransition if it has not converged; TransportError or GenerationChanged, the transfer
        being aborted then."""
        self.transfer.freeze(self._written())
        try:
            await self._send_drained()
        except GenerationChanged as error:
            self.transfer.abort(f"the pages of a frozen writer changed: {error}")
            raise

    async def _send_drained(self) -> None:
        """A round of every pair. A pair that fails doesn't stop the others: none may be writing
        afterwards."""
        drained = [tracker.drain() for tracker in self._trackers]
        sends = [
            sender.send_round(part.ranges, part.watermark, timeout_s=self._round_timeout_s)
            for sender, part in zip(self._senders, drained, strict=True)
        ]
        results = await asyncio.gather(*sends, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        broken = [error for error in errors if not isinstance(error, GenerationChanged)]
        if broken:
            self.transfer.abort(str(broken[0]))
        for error in broken or errors:
            raise error
        for index, result in enumerate(results):
            assert not isinstance(result, BaseException)
            self.transfer.observe_applied(index, result.watermark)
            self.byte_count += result.byte_count

    def _changed(self) -> bool:
        return any(sender.generation_changed() for sender in self._senders)

    def _written(self) -> int:
        return max((tracker.written() for tracker in self._trackers), default=0)

    def _restart(self) -> TransferState:
        for sender, tracker in zip(self._senders, self._trackers, strict=True):
            sender.restart()
            tracker.restart()
        return self.transfer.restart()
