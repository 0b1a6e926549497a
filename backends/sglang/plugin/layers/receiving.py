"""The receiving end of layers' KV: memory of layers that the rank is about to get, and how far it is filled."""

import threading
import time

from meshift.backends.sglang.plugin.layers.rows import LayerRows
from meshift.backends.sglang.wire_layers import LayerPair
from meshift.kv_memory.transport.base import Patch


class LayerReceiver:
    """One pair at its destination. `apply` runs on the data thread."""

    def __init__(self, pair: LayerPair, rows: LayerRows, arrived: threading.Condition) -> None:
        """`arrived` is notified of each patch."""
        self.pair = pair
        self.applied = -1
        """`T_applied`: the watermark of the last patch; -1 before the first round is whole."""
        self.rounds = 0
        """Begun."""
        self.byte_count = 0
        self._rows = rows
        self._arrived = arrived

    def apply(self, patch: Patch) -> None:
        """A `PatchHandler`. Raises ValueError for what isn't to be written."""
        area = patch.rectangle
        if (area.layer_start, area.layer_end) != (self.pair.start, self.pair.end):
            raise ValueError(f"layers {area.layer_start}-{area.layer_end} for those of {self.pair.transfer_id}")
        if patch.generation < self.rounds:
            raise ValueError(f"round {patch.generation} after {self.rounds}")
        self._rows.scatter(patch.payload)
        with self._arrived:
            self.rounds = patch.generation
            if patch.watermark:
                self.applied = max(self.applied, patch.watermark)
            self.byte_count += memoryview(patch.payload).nbytes
            self._arrived.notify_all()


def wait_until_applied(
    receivers: list[LayerReceiver], watermark: int, arrived: threading.Condition, timeout_s: float
) -> bool:
    """Whether all of these have applied that much, in time. On the step thread, which stands still meanwhile."""
    deadline_s = time.monotonic() + timeout_s
    with arrived:
        while any(receiver.applied < watermark for receiver in receivers):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            arrived.wait(left_s)
    return True
