"""Child processes that end with their parent, however the parent ends."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1

# Loaded here: between fork and exec nothing may be imported.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def end_with_parent(death_signal: signal.Signals = signal.SIGTERM) -> Callable[[], None] | None:
    """A `preexec_fn` that makes the kernel send `death_signal` to the child when the thread that forked it ends.

    None where the kernel can't (outside Linux): the child then outlives a killed parent.
    """
    libc = _libc
    if libc is None:
        return None
    parent = os.getpid()

    def before_exec() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
        # The parent may have died before the kernel was told.
        if os.getppid() != parent:
            os._exit(1)

    return before_exec
