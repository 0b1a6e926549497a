"""A process that has imported an engine and forks ranks: `python -P -m meshift.backends.sglang.fork_main`.

SGLang's imports take 10 s of CPU time, and all ranks of a worker import the same. So the worker starts this process
once, and a rank is a fork of it: a start costs what the rank itself does. Linux only.

Arguments: FD MODULE PARENT_PID. MODULE has `prepare()`, which imports, and `run(spec_path)`, a rank's main program.
Descriptor FD carries connections, one an instance. A connection carries a request per rank (`ForkRequest`) and answers
with `Forked` and a pidfd, later with `Exited`. When a connection ends, its ranks are killed.
"""

import array
import contextlib
import ctypes
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from meshift.backends.sglang.fork_wire import MESSAGE_BYTES_MAX, Exited, Forked, ForkRequest

_PR_SET_PDEATHSIG = 1
EXIT_FAILED = 1
EXIT_ORPHANED = 3

Run = Callable[[str], None]


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(EXIT_ORPHANED)


@dataclass(eq=False, slots=True)
class _Connection:
    """An instance of the worker's."""

    socket: socket.socket
    children: set[int] = field(default_factory=set)
    open: bool = True
    """Whether the worker may still ask."""


class ForkServer:
    """Serves until the worker has closed everything. One thread, so that a fork is a whole copy."""

    def __init__(self, control: socket.socket, run: Run) -> None:
        self._control = control
        self._run = run
        self._selector = selectors.DefaultSelector()
        self._connections: set[_Connection] = set()
        self._open = True
        self._selector.register(control, selectors.EVENT_READ, self._accept)

    def serve(self) -> None:
        """Returns when neither a connection nor the worker's end of the control socket is left."""
        while self._open or self._connections:
            for key, _ in self._selector.select():
                key.data()

    def _accept(self) -> None:
        data, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        if not data:
            self._selector.unregister(self._control)
            self._open = False
            return
        connection = _Connection(socket.socket(fileno=descriptors[0]))
        self._connections.add(connection)
        self._selector.register(connection.socket, selectors.EVENT_READ, lambda: self._hear(connection))

    def _hear(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(MESSAGE_BYTES_MAX)
        except ConnectionError:
            data = b""
        if data:
            self._fork(connection, msgspec.json.decode(data, type=ForkRequest))
            return
        self._selector.unregister(connection.socket)
        connection.open = False
        for pid in connection.children:
            os.kill(pid, signal.SIGKILL)
        self._close_if_done(connection)

    def _fork(self, connection: _Connection, request: ForkRequest) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(request, parent)
        with contextlib.suppress(PermissionError, ProcessLookupError):  # it has done so itself, or has ended
            os.setpgid(pid, pid)
        connection.children.add(pid)
        pidfd = os.pidfd_open(pid)
        _send(connection, Forked(pid=pid), pidfd)
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._reap(connection, pid, pidfd))

    def _reap(self, connection: _Connection, pid: int, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        connection.children.discard(pid)
        _send(connection, Exited(pid=pid, code=os.waitstatus_to_exitcode(status)))
        self._close_if_done(connection)

    def _close_if_done(self, connection: _Connection) -> None:
        if not connection.open and not connection.children:
            connection.socket.close()
            self._connections.discard(connection)

    def _become(self, request: ForkRequest, parent: int) -> None:
        """The rank; never returns."""
        code = EXIT_FAILED
        try:
            die_with_parent(parent)
            os.setpgid(0, 0)
            log = os.open(request.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.dup2(log, sys.stdout.fileno())
            os.dup2(log, sys.stderr.fileno())
            os.close(log)
            self._forget()
            os.environ.clear()
            os.environ.update(request.environment)
            signal.signal(signal.SIGQUIT, signal.SIG_DFL)
            self._run(request.spec_path)
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else EXIT_FAILED
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _forget(self) -> None:
        """Close what is the server's: a rank that held it open would hide the server's end from the worker."""
        pidfds = [key.fileobj for key in self._selector.get_map().values() if isinstance(key.fileobj, int)]
        self._selector.close()
        for pidfd in pidfds:
            os.close(pidfd)
        for connection in self._connections:
            connection.socket.close()
        self._control.close()


def _send(connection: _Connection, message: Forked | Exited, pidfd: int | None = None) -> None:
    descriptors = [] if pidfd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [pidfd]))]
    with contextlib.suppress(ConnectionError):  # the worker has gone: its end is heard of next
        connection.socket.sendmsg([msgspec.json.encode(message)], descriptors)


def main() -> None:
    """Import, then serve. SIGQUIT, by which a failing rank of SGLang's ends its parent, is ignored: the worker hears of
    the failure in its own way."""
    control = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent(int(sys.argv[3]))
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    module = importlib.import_module(sys.argv[2])
    module.prepare()
    # What is imported is never collected; a collector that marked it would copy every page of it in every rank.
    gc.collect()
    gc.freeze()
    ForkServer(control, module.run).serve()


if __name__ == "__main__":
    main()
