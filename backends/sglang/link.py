"""The worker's end of the sockets to its ranks."""

import asyncio
import logging
from collections.abc import Callable

import zmq

from meshift.backends.sglang import folders, wire
from meshift.schemas.errors import Overloaded

logger = logging.getLogger(__name__)

COMMAND_QUEUE_MAX = 100_000
"""Commands that wait for rank 0 before `send` refuses."""

CONNECT_POLL_S = 0.005
REPORT_QUEUE_MAX = 1_000_000

READ_MAX = 64
"""Reports handled before the loop gets a turn."""


class RankLink:
    """Commands out in order, reports in. Sockets and specs lie in a private folder that goes with it."""

    def __init__(self) -> None:
        for gone in folders.sweep():
            logger.info("removed %s: its worker was killed", gone)
        self._private = folders.PrivateFolder()
        self.folder = self._private.path
        self.commands_address = f"ipc://{self.folder}/commands"
        self.reports_address = f"ipc://{self.folder}/reports"
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PUSH)
        self._commands.setsockopt(zmq.SNDHWM, COMMAND_QUEUE_MAX)
        self._commands.bind(self.commands_address)
        self._reports = self._context.socket(zmq.PULL)
        self._reports.setsockopt(zmq.RCVHWM, REPORT_QUEUE_MAX)
        self._reports.bind(self.reports_address)
        self._loop: asyncio.AbstractEventLoop | None = None
        """While it reads."""

    def start(self, handler: Callable[[wire.Report], None], on_broken: Callable[[str], None]) -> None:
        """Hand each report to `handler`; `on_broken` hears why no more will come."""
        self._handler, self._on_broken = handler, on_broken
        self._loop = asyncio.get_running_loop()
        # Not with zmq's own asyncio sockets: they take as long for a message as all else that is done with it.
        self._loop.add_reader(self._reports.fileno(), self._read)
        # The descriptor tells of what comes from now on.
        self._loop.call_soon(self._read)

    def _read(self) -> None:
        for _ in range(READ_MAX):
            if self._loop is None:
                return
            try:
                data = self._reports.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(data)
        if self._loop is not None:
            self._loop.call_soon(self._read)

    def _handle(self, data: bytes) -> None:
        try:
            self._handler(wire.decode_report(data))
        except Exception as error:
            logger.exception("a report could not be handled")
            self._stop_reading()
            self._on_broken(f"a report could not be handled: {error!r}")

    def _stop_reading(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._reports.fileno())
            self._loop = None

    async def connected(self) -> None:
        """Wait until rank 0 has connected; before, there is no queue to put commands into."""
        while not self._commands.poll(0, zmq.POLLOUT):  # noqa: ASYNC110 - nothing tells us
            await asyncio.sleep(CONNECT_POLL_S)

    def send(self, command: wire.Command) -> None:
        """Queue a command behind the earlier ones. Raises Overloaded when the ranks don't take them any more."""
        try:
            self._commands.send(wire.encode(command), zmq.NOBLOCK)
        except zmq.Again:
            raise Overloaded("the engine doesn't take requests now") from None

    async def close(self) -> None:
        """Stop reading and remove the folder. Idempotent."""
        self._stop_reading()
        self._reports.close(linger=0)
        self._commands.close(linger=0)
        self._context.term()
        self._private.remove()
