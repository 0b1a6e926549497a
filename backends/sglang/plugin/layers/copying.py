"""The sending end of layers' KV: a thread that copies all live slots, then what was written meanwhile, until the end.

    step thread                                copy thread                         data thread
    writes slots, marks them   --note()-->     swaps the marks, gathers  --post->  sends
    finish(): the last marks   ------------>   gathers them too

A patch's watermark is the count of tokens that were scheduled when its round began; only what ends a round carries the
round's. Its generation is the number of the round.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from meshift.backends.sglang.plugin.data_plane import DataPlane
from meshift.backends.sglang.plugin.layers.rows import LayerRows, Slots
from meshift.backends.sglang.wire_layers import LayerPair
from meshift.kv_memory.data_thread import CHECKSUM_LATER
from meshift.kv_memory.dirty_map import DirtyMap
from meshift.kv_memory.rectangle import Rectangle
from meshift.kv_memory.staging import StagingBuffer
from meshift.kv_memory.transport.base import Address, Patch, TransportError

PIECE_BYTES_MAX = 2 << 20
"""Of one patch: short enough that a small one soon gets its turn behind it."""

PIECES_IN_FLIGHT_MAX = 4
"""Of one pair."""

ROUND_PAUSE_S = 0.01
"""Between two rounds that nobody waits for: each costs the step thread some time of the interpreter."""

PATCH_TIMEOUT_S = 30.0
"""For one patch, from when it was gathered."""

WAIT_S = 0.05
logger = logging.getLogger(__name__)


class PairCopy:
    """One pair at its source."""

    def __init__(self, pair: LayerPair, address: Address, rows: LayerRows, dirty: DirtyMap, live: Slots) -> None:
        """On the writer's thread. `live`: slots that hold anything."""
        self.pair = pair
        self.address = address
        self.rows = rows
        self.problem = ""
        self.byte_count = 0
        """Applied."""
        self.last_tokens, self.last_bytes = 0, 0
        """Of what lagged at the end."""
        self.in_flight = threading.Semaphore(PIECES_IN_FLIGHT_MAX)
        self.posted, self.done = 0, 0
        """Patches. The first is the copy thread's, the second the data thread's."""
        self.round = 0
        self.sent_watermark = -1
        self._dirty = dirty
        self._lock = threading.Lock()
        """Around swaps: of the copy thread, and the writer's last one."""
        dirty.add_reader(pair.transfer_id, live)

    def drain(self) -> Slots:
        """What was written since the last time."""
        with self._lock:
            if self.pair.transfer_id not in self._dirty.readers:
                return np.empty(0, np.int64)
            return self._dirty.swap(self.pair.transfer_id)

    def close(self) -> Slots:
        """The last marks; later ones don't count. On the writer's thread; idempotent."""
        slots = self.drain()
        with self._lock:
            self._dirty.remove_reader(self.pair.transfer_id)
        return slots


class LayerCopy:
    """All pairs of one change that one rank sends. Methods are the step thread's unless they say otherwise."""

    def __init__(
        self,
        pairs: Sequence[PairCopy],
        data: DataPlane,
        heads: tuple[int, int],
        scheduled: Callable[[], int],
        bytes_per_s: float | None,
    ) -> None:
        """`scheduled`: tokens whose KV is written and marked; `heads` of this rank."""
        self.pairs = tuple(pairs)
        self._data = data
        self._heads = heads
        self._scheduled = scheduled
        self._bytes_per_s = bytes_per_s
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._last: list[Slots] | None = None
        self._last_watermark = 0
        self._finished = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to copy."""
        # Of the computing threads' priority: at the end the other stage may wait for it.
        self._thread = threading.Thread(target=self._run, name="meshift-layers", daemon=True)
        self._thread.start()

    def note(self) -> None:
        """Something was written."""
        self._wake.set()

    def finish(self) -> None:
        """Nothing of these layers is written any more: send what lags. Idempotent."""
        if self._last is None:
            last = [pair.close() for pair in self.pairs]
            self._last_watermark = self._scheduled()
            self._last = last
            self._wake.set()

    @property
    def problem(self) -> str:
        """Why it can't come to an end."""
        return next((pair.problem for pair in self.pairs if pair.problem), "")

    @property
    def is_finished(self) -> bool:
        """Whether all of it is applied at the other end."""
        return self._finished.is_set() and all(pair.done == pair.posted for pair in self.pairs)

    def stop(self) -> None:
        """Send nothing more. What is posted may still be on its way: the transfers are to be quiesced."""
        for pair in self.pairs:
            pair.close()
        self._stopped.set()
        self._wake.set()

    def join(self) -> None:
        """After `stop`. Not on the step thread."""
        if self._thread is not None:
            self._thread.join()

    # ---- the copy thread ----

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                if self._last is not None:
                    self._send_last(self._last)
                    return
                began_s = time.monotonic()
                for pair in self.pairs:
                    self._send_round(pair)
                self._pause(began_s)
        except Exception as error:
            logger.exception("layers can't be copied")
            for pair in self.pairs:
                pair.problem = pair.problem or f"KV can't be copied: {error!r}"

    def _pause(self, began_s: float) -> None:
        """Until something is written, and not at once."""
        while not (self._wake.wait(WAIT_S) or self._stopped.is_set()):
            pass
        self._wake.clear()
        left_s = began_s + ROUND_PAUSE_S - time.monotonic()
        if left_s > 0 and self._last is None:
            # `finish` cuts it short.
            self._wake.wait(left_s)

    def _send_round(self, pair: PairCopy) -> None:
        # The watermark first: what is written in between is in the round without being promised by it.
        watermark = self._scheduled()
        slots = pair.drain()
        if len(slots) or watermark > pair.sent_watermark:
            self._send(pair, slots, watermark)

    def _send_last(self, last: list[Slots]) -> None:
        for pair, slots in zip(self.pairs, last, strict=True):
            pair.last_tokens, pair.last_bytes = len(slots), len(slots) * pair.rows.slot_bytes
            # If a round has promised everything, the receiver may have closed already.
            if len(slots) or self._last_watermark > pair.sent_watermark:
                self._send(pair, slots, self._last_watermark)
        self._finished.set()

    def _send(self, pair: PairCopy, slots: Slots, watermark: int) -> None:
        step = max(1, PIECE_BYTES_MAX // pair.rows.slot_bytes)
        pair.round += 1
        for start in range(0, max(len(slots), 1), step):
            piece = slots[start : start + step]
            is_last = start + step >= len(slots)
            if not self._post(pair, piece, watermark if is_last else max(pair.sent_watermark, 0)):
                return
        pair.sent_watermark = watermark

    def _post(self, pair: PairCopy, slots: Slots, watermark: int) -> bool:
        """Whether it is on its way."""
        while not pair.in_flight.acquire(timeout=WAIT_S):
            if self._stopped.is_set() or pair.problem:
                return False
        size = len(slots) * pair.rows.slot_bytes
        buffer = self._buffer(pair, size)
        if buffer is None:
            return False
        began_s = time.monotonic()
        if size:
            pair.rows.gather(slots, buffer.view)
        rectangle = Rectangle(pair.pair.start, pair.pair.end, 0, len(slots), *self._heads)
        patch = Patch(pair.pair.transfer_id, watermark, pair.round, rectangle, buffer.view, CHECKSUM_LATER)
        pair.posted += 1
        self._data.post(pair.address, patch, PATCH_TIMEOUT_S, partial(self._note_done, pair, buffer, size))
        if self._bytes_per_s is not None:
            self._stopped.wait(max(0.0, began_s + size / self._bytes_per_s - time.monotonic()))
        return True

    def _buffer(self, pair: PairCopy, size: int) -> StagingBuffer | None:
        """Staging memory, when there is some; None: nobody wants it any more."""
        while not (self._stopped.is_set() or pair.problem):
            buffer = self._data.staging.try_acquire(size)
            if buffer is not None:
                return buffer
            self._stopped.wait(0.001)
        return None

    @staticmethod
    def _note_done(pair: PairCopy, buffer: StagingBuffer, size: int, error: TransportError | None) -> None:
        """On the data thread."""
        buffer.release()
        if error is not None:
            pair.problem = pair.problem or f"KV of layers {pair.pair.start}-{pair.pair.end}: {error}"
        else:
            pair.byte_count += size
        pair.done += 1
        pair.in_flight.release()
