"""Loads layers beside the steps: a thread of low priority."""

import logging
import os
import threading
from collections.abc import Callable, Sequence

from torch.nn import ModuleList

from meshift.backends.sglang.plugin.layers.weights import LayerWeights, LoadStopped

NICENESS = 15
"""Of threads whose work waits for that of steps."""

logger = logging.getLogger(__name__)


def start_background(name: str, work: Callable[[], None]) -> threading.Thread:
    """A thread that is scheduled after all others."""

    def run() -> None:
        # Linux knows priorities of threads by this call.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


class Loading:
    """The layers that one change brings to this rank."""

    def __init__(self, weights: LayerWeights, layers: Sequence[int], target: tuple[int, int]) -> None:
        """`layers` of the range `target` are still to be loaded."""
        self.layers = tuple(layers)
        self.problem = ""
        self.listed: ModuleList | None = None
        """The model's new list of layers, once it is made: the switch doesn't pay for it then."""
        self._target = target
        self._weights = weights
        self._loaded: list[int] = []
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def loaded(self) -> int:
        """How many are there."""
        return len(self._loaded)

    @property
    def is_complete(self) -> bool:
        """Whether all are there."""
        return self.loaded == len(self.layers)

    def start(self) -> None:
        """Idempotent."""
        if self._thread is None:
            self._thread = start_background("meshift-load", self._load)

    def stop(self) -> None:
        """Load nothing more; `undo` waits for it."""
        self._stopped.set()

    def undo(self) -> None:
        """Wait for the thread and drop what was loaded. Not on the step thread."""
        self.stop()
        if self._thread is not None:
            self._thread.join()
        while self._loaded:
            self._weights.drop(self._loaded.pop())

    def _load(self) -> None:
        self.listed = self._weights.stack.listed(*self._target)
        for layer in self.layers:
            try:
                source = self._weights.load(layer, self._stopped.is_set)
            except LoadStopped:
                return
            except Exception as error:
                logger.exception("layer %d can't be loaded", layer)
                self.problem = f"layer {layer} can't be loaded: {error!r}"
                return
            logger.info("layer %d loaded from %s", layer, source)
            self._loaded.append(layer)
