"""One change of layers at one rank: what it holds, and how its memory goes in the end."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshift.backends.sglang.plugin.data_plane import DataPlane
from meshift.backends.sglang.plugin.layers.copying import LayerCopy
from meshift.backends.sglang.plugin.layers.loading import Loading, start_background
from meshift.backends.sglang.plugin.layers.pool import LayerBuffers
from meshift.backends.sglang.plugin.layers.receiving import LayerReceiver
from meshift.backends.sglang.plugin.layers.table import ChangeEvent, ChangeState, next_state
from meshift.backends.sglang.plugin.layers.weights import LayerWeights
from meshift.backends.sglang.wire_layers import BeginLayers

QUIET_TIMEOUT_S = 60.0


class HeldBack:
    """How long a stage could have stepped and was held back, at the longest."""

    def __init__(self) -> None:
        self.longest_ns = 0
        self._since_ns: int | None = None

    def hold(self) -> None:
        """It could step now, and may not."""
        if self._since_ns is None:
            self._since_ns = time.monotonic_ns()

    def let_go(self) -> None:
        """It may step, if it can."""
        if self._since_ns is not None:
            self.longest_ns = max(self.longest_ns, time.monotonic_ns() - self._since_ns)
            self._since_ns = None


@dataclass(slots=True)
class Change:
    """All fields are the step thread's."""

    command: BeginLayers
    current: tuple[int, int]
    target: tuple[int, int]
    loading: Loading
    deadline_s: float
    state: ChangeState = ChangeState.OPEN
    receivers: list[LayerReceiver] = field(default_factory=list)
    arrived: threading.Condition = field(default_factory=threading.Condition)
    copy: LayerCopy | None = None
    held: HeldBack = field(default_factory=HeldBack)
    problem: str = ""
    expiring: bool = False
    drain_left: int = 0
    """Boundaries until nothing is launched."""
    drain_nonce: int | None = None
    flush_nonce: int | None = None
    switch: tuple[int, int] | None = None
    """Nonces of a switch that is due, or done and not answered yet: of the answer, and of when it is settled."""
    final_watermark: int | None = None
    switched_at: int = -1
    switch_ns: int = 0
    hashes: list[tuple[int, str]] = field(default_factory=list)
    dropped: list[LayerBuffers] = field(default_factory=list)
    cleaner: threading.Thread | None = None
    end_nonces: list[int] = field(default_factory=list)
    """Whom to tell that it has ended."""
    expired: bool = False

    @property
    def change_id(self) -> str:
        """Its name."""
        return self.command.change_id

    def move(self, event: ChangeEvent) -> None:
        """Go on. Raises IllegalTransition."""
        self.state = next_state(self.state, event)

    @property
    def lost_layers(self) -> list[int]:
        """That the rank has now and won't have."""
        return [layer for layer in range(*self.current) if layer not in range(*self.target)]

    def trouble(self) -> str:
        """Why it can't be committed."""
        copying = "" if self.copy is None else self.copy.problem
        return self.problem or self.loading.problem or copying

    @property
    def is_flushed(self) -> bool:
        """Whether nothing lags any more, as far as this rank is concerned. After `LayerCopy.finish`."""
        sent = self.copy is None or self.copy.is_finished
        watermark = self.final_watermark
        return sent and watermark is not None and all(one.applied >= watermark for one in self.receivers)


def clean_after_switch(change: Change, weights: LayerWeights, data: DataPlane) -> None:
    """Free what the rank doesn't hold any more, in the background."""
    receivers, copy = change.receivers, _take_copy(change)

    def clean() -> None:
        _wait_quiet(copy, receivers, data)
        change.dropped.clear()
        for layer in change.lost_layers:
            weights.drop(layer)

    change.receivers = []
    change.cleaner = start_background("meshift-free", clean)


def clean_after_abort(change: Change, data: DataPlane) -> None:
    """Let writers go quiet and free what they wrote to, in the background. The pool doesn't know that memory any
    more."""
    receivers, copy = change.receivers, _take_copy(change)
    change.loading.stop()

    def clean() -> None:
        _wait_quiet(copy, receivers, data)
        change.loading.undo()
        receivers.clear()

    change.receivers = []
    change.cleaner = start_background("meshift-free", clean)


def _take_copy(change: Change) -> LayerCopy | None:
    """It sends nothing more."""
    copy, change.copy = change.copy, None
    if copy is not None:
        copy.stop()
    return copy


def _wait_quiet(copy: LayerCopy | None, receivers: Sequence[LayerReceiver], data: DataPlane) -> None:
    """Return when nobody sends or receives for the change any more."""
    if copy is not None:
        copy.join()
    pairs = [receiver.pair for receiver in receivers] + [pair.pair for pair in (copy.pairs if copy else ())]
    left = threading.Semaphore(0)
    for pair in pairs:
        data.quiesce(pair.transfer_id, left.release)
    deadline_s = time.monotonic() + QUIET_TIMEOUT_S
    for _ in pairs:
        left.acquire(timeout=max(0.0, deadline_s - time.monotonic()))
