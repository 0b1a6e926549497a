"""Starts, watches and ends the rank processes of one instance. Linux only, as SGLang is.

A rank lies in a process group of its own, so that whatever it starts ends with it; if the worker is killed, the
kernel kills the rank (see `rank`). Nothing here waits on the event loop.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LOG_TAIL_BYTES = 4096
KILL_WAIT_S = 5.0
"""A killed process is gone long before."""

CHILDREN_WAIT_S = 1.0


@dataclass(slots=True)
class RankProcess:
    """One rank."""

    rank: int
    process: subprocess.Popen[bytes]
    log_path: Path
    log_start: int
    """Where this run's output begins in the log."""
    exited: asyncio.Event
    pidfd: int

    @property
    def pid(self) -> int:
        return self.process.pid

    def log_tail(self) -> str:
        """The last of what this run wrote."""
        with contextlib.suppress(OSError), self.log_path.open("rb") as log:
            size = os.fstat(log.fileno()).st_size
            log.seek(max(self.log_start, size - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace")
        return ""

    def describe_exit(self) -> str:
        """How it ended, with its last words."""
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited ({code})"
        return f"rank {self.rank} (pid {self.pid}) {how}; last of {self.log_path}:\n{self.log_tail()}"


ExitHandler = Callable[[RankProcess], None]


def start_rank(
    rank: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    log_path: Path,
    on_exit: ExitHandler,
) -> RankProcess:
    """Start a rank by `command`; `on_exit` is called on the running loop as soon as it has ended.

    Must be called on a thread that lives as long as the rank may: the kernel takes that thread's end for the
    worker's.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            process_group=0,
        )
        started = RankProcess(rank, process, log_path, log.tell(), asyncio.Event(), os.pidfd_open(process.pid))
    _watch(started, on_exit)
    return started


def _watch(rank: RankProcess, on_exit: ExitHandler) -> None:
    loop = asyncio.get_running_loop()

    def ended() -> None:
        loop.remove_reader(rank.pidfd)
        os.close(rank.pidfd)
        rank.process.wait()
        rank.exited.set()
        on_exit(rank)

    loop.add_reader(rank.pidfd, ended)


async def end_ranks(ranks: Sequence[RankProcess], deadline_s: float) -> None:
    """End all ranks at once: politely, and by force after `deadline_s`. Returns when none is left. May be repeated.

    There is nothing to save: the ranks' state is the requests' KV, and requests go on elsewhere.
    """
    for rank in ranks:
        rank.process.terminate()
    if not await _all_exited(ranks, deadline_s):
        for rank in ranks:
            rank.process.kill()
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


class QuitSignalShield:
    """A failing rank sends SIGQUIT to its parent, by which SGLang's launcher would end everything. The worker hears
    of the failure in its own way, and must survive it."""

    _users = 0
    _previous: signal.Handlers | Callable[..., object] | int | None = None

    @classmethod
    def hold(cls) -> None:
        """Ignore SIGQUIT until as many calls of `drop`. Only the main thread may, Python says."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("an engine must be started on the main thread: it has to ignore SIGQUIT")
        if cls._users == 0:
            cls._previous = signal.signal(signal.SIGQUIT, signal.SIG_IGN)
        cls._users += 1

    @classmethod
    def drop(cls) -> None:
        """Restore the handler after the last user."""
        cls._users -= 1
        if cls._users == 0:
            signal.signal(signal.SIGQUIT, cls._previous)
