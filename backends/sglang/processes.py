"""The rank processes of one instance: watched, and ended. Linux only, as SGLang is.

A rank lies in a process group of its own, so that whatever it starts ends with it; if the worker is killed, the
kernel kills the rank (see `fork_main`). Nothing here waits on the event loop.
"""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LOG_TAIL_BYTES = 4096
KILL_WAIT_S = 5.0
"""A killed process is gone long before."""

CHILDREN_WAIT_S = 1.0


@dataclass(slots=True)
class RankProcess:
    """One rank."""

    rank: int
    pid: int
    pidfd: int
    """Until it has exited."""
    log_path: Path
    log_start: int
    """Where this run's output begins in the log."""
    exited: asyncio.Event = field(default_factory=asyncio.Event)
    exit_code: int | None = None
    """Negative: the signal that killed it."""

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing happens to one that has exited."""
        if not self.exited.is_set():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def note_exit(self, code: int) -> None:
        """It has exited, and been collected."""
        os.close(self.pidfd)
        self.exit_code = code
        self.exited.set()

    def log_tail(self) -> str:
        """The last of what this run wrote."""
        return file_tail(self.log_path, self.log_start)

    def describe_exit(self) -> str:
        """How it ended, with its last words."""
        code = self.exit_code
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited ({code})"
        return f"rank {self.rank} (pid {self.pid}) {how}; last of {self.log_path}:\n{self.log_tail()}"


ExitHandler = Callable[[RankProcess], None]


def file_tail(path: Path, start: int) -> str:
    """The last of what was written from `start` on."""
    with contextlib.suppress(OSError), path.open("rb") as log:
        size = os.fstat(log.fileno()).st_size
        log.seek(max(start, size - LOG_TAIL_BYTES))
        return log.read().decode(errors="replace")
    return ""


async def end_ranks(ranks: Sequence[RankProcess], deadline_s: float) -> None:
    """End all ranks at once: politely, and by force after `deadline_s`. Returns when none is left. May be repeated.

    There is nothing to save: the ranks' state is the requests' KV, and requests go on elsewhere.
    """
    for rank in ranks:
        rank.send_signal(signal.SIGTERM)
    if not await _all_exited(ranks, deadline_s):
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
        if not await _all_exited(ranks, KILL_WAIT_S):
            left = [rank.pid for rank in ranks if not rank.exited.is_set()]
            raise TimeoutError(f"ranks don't end though killed: {left}")
    await _end_children(ranks)


async def _end_children(ranks: Sequence[RankProcess]) -> None:
    """Python's resource tracker outlives a rank by some milliseconds, to remove the semaphores that it left; whatever
    else outlives it is killed."""
    for pidfd in _open_members({rank.pid for rank in ranks}):
        gone = asyncio.Event()
        asyncio.get_running_loop().add_reader(pidfd, gone.set)
        try:
            await asyncio.wait_for(gone.wait(), CHILDREN_WAIT_S)
        except TimeoutError:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)


def _open_members(groups: set[int]) -> list[int]:
    """Descriptors of the processes in these process groups."""
    pidfds = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) in groups and fields[0] not in "ZX":
                pidfds.append(os.pidfd_open(int(stat.parent.name)))
    return pidfds


async def _all_exited(ranks: Sequence[RankProcess], timeout_s: float) -> bool:
    waits = asyncio.gather(*(rank.exited.wait() for rank in ranks))
    try:
        await asyncio.wait_for(waits, max(timeout_s, 0.0))
    except TimeoutError:
        return False
    return True


def free_loopback_port() -> int:
    """A TCP port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
