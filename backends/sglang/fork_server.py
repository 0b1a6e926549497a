"""The worker's side of a fork server (`fork_main`): one process for all instances of a worker that import alike."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from meshift.backends.base import EngineStartError
from meshift.backends.sglang.fork_wire import MESSAGE_BYTES_MAX, Exited, Forked, ForkRequest
from meshift.backends.sglang.processes import ExitHandler, RankProcess, file_tail

RANK_MODULE = "meshift.backends.sglang.rank"

Key = tuple[str, tuple[tuple[str, str], ...]]


class ForkServer:
    """One process that forks ranks. Shared: whoever has opened it closes it, and the last one ends it."""

    _running: dict[Key, "ForkServer"] = {}  # noqa: RUF012 - the process's own registry

    def __init__(self, key: Key, module: str, environment: Mapping[str, str], log_path: Path) -> None:
        self._key = key
        self._users = 0
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, log_path.open("ab") as log:
            self.log_start = log.tell()
            # -P: the working directory must not shadow packages that SGLang imports.
            program = (sys.executable, "-P", "-m", "meshift.backends.sglang.fork_main")
            self._process = subprocess.Popen(
                [*program, str(theirs.fileno()), module, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                process_group=0,
                pass_fds=[theirs.fileno()],
            )

    @classmethod
    def open(cls, module: str, environment: Mapping[str, str], own: Iterable[str], log_path: Path) -> "ForkServer":
        """The running one that imported `module` in such an environment, else a new one. `own` names the variables that
        each rank may have of its own, because no import reads them.

        Must be called on a thread that lives as long as the ranks may: the kernel takes that thread's end for the
        worker's.
        """
        left_out = set(own)
        chosen = {
            name: value for name, value in environment.items() if name not in left_out and os.environ.get(name) != value
        }
        key = (module, tuple(sorted(chosen.items())))
        server = cls._running.get(key)
        if server is None or server._process.poll() is not None:
            common = {name: value for name, value in environment.items() if name not in left_out}
            server = cls._running[key] = cls(key, module, common, log_path)
        server._users += 1
        return server

    def close(self) -> None:
        """End the process if nobody else has it open. The ranks are their connections'."""
        self._users -= 1
        if self._users:
            return
        if self._running.get(self._key) is self:
            del self._running[self._key]
        self._control.close()
        if self._process.poll() is None:
            # It has nothing to save; the kernel ends its ranks, if there are any left, with it.
            self._process.kill()
        self._process.wait()

    def connect(self) -> socket.socket:
        """A connection for one instance. Raises EngineStartError when the process has ended."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                socket.send_fds(self._control, [b"c"], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise EngineStartError(self.describe_end()) from error
        ours.setblocking(False)
        return ours

    def describe_end(self) -> str:
        """That it has ended, with its last words."""
        code = self._process.poll()
        words = file_tail(self.log_path, self.log_start)
        return f"the process that starts ranks has ended ({code}); last of {self.log_path}:\n{words}"


class Forks:
    """The ranks of one instance, forked by a server. Everything happens on the running loop; nothing waits on it."""

    def __init__(self, server: ForkServer, on_exit: ExitHandler) -> None:
        self._server = server
        self._on_exit = on_exit
        self._socket = server.connect()
        self._asked: list[tuple[asyncio.Future[RankProcess], Callable[[int, int], RankProcess]]] = []
        self._alive: dict[int, RankProcess] = {}
        self._loop = asyncio.get_running_loop()
        self._closed = self._loop.create_future()
        self._loop.add_reader(self._socket, self._hear)

    async def start(self, rank: int, spec_path: Path, environment: Mapping[str, str], log_path: Path) -> RankProcess:
        """Start a rank, as soon as the server has imported. `on_exit` is called when it has ended. Raises
        EngineStartError."""
        log_start = _end_of(log_path)
        request = ForkRequest(spec_path=str(spec_path), log_path=str(log_path), environment=dict(environment))
        forked: asyncio.Future[RankProcess] = self._loop.create_future()
        try:
            self._socket.send(msgspec.json.encode(request))
        except OSError as error:
            raise EngineStartError(f"rank {rank} can't be asked for: {error}; {self._server.describe_end()}") from error
        self._asked.append((forked, lambda pid, pidfd: RankProcess(rank, pid, pidfd, log_path, log_start)))
        return await forked

    def _hear(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES_MAX, 1)
        except BlockingIOError:
            return
        except ConnectionError:
            data, descriptors = b"", []
        if not data:
            self._lose()
            return
        match msgspec.json.decode(data, type=Forked | Exited):
            case Forked(pid=pid):
                forked, make = self._asked.pop(0)
                process = self._alive[pid] = make(pid, descriptors[0])
                if not forked.done():
                    forked.set_result(process)
            case Exited(pid=pid, code=code):
                self._end(self._alive.pop(pid), code)

    def _end(self, process: RankProcess, code: int) -> None:
        process.note_exit(code)
        self._on_exit(process)

    def _lose(self) -> None:
        """The server has ended, or has ended all ranks as we asked it to. The kernel ends what it left."""
        self._loop.remove_reader(self._socket)
        self._socket.close()
        if not self._closed.done():
            self._closed.set_result(None)
        for forked, _ in self._asked:
            if not forked.done():
                forked.set_exception(EngineStartError(self._server.describe_end()))
        self._asked.clear()
        for process in list(self._alive.values()):
            self._end(self._alive.pop(process.pid), -signal.SIGKILL)

    async def close(self, timeout_s: float) -> None:
        """Kill the ranks that are left, and wait until none is. Raises TimeoutError."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        try:
            async with asyncio.timeout(timeout_s):
                await self._closed
        finally:
            self._server.close()


def _end_of(log_path: Path) -> int:
    """Where what is appended will begin; its folder is made."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    return log_path.stat().st_size if log_path.exists() else 0
