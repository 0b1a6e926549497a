"""The worker's end of the sockets to its ranks."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

import zmq
import zmq.asyncio

from meshift.backends.sglang import folders, wire
from meshift.schemas.errors import Overloaded

logger = logging.getLogger(__name__)

COMMAND_QUEUE_MAX = 100_000
"""Commands that wait for rank 0 before `send` refuses."""

CONNECT_POLL_S = 0.005
REPORT_QUEUE_MAX = 1_000_000


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
        self._reports = zmq.asyncio.Context.shadow(self._context).socket(zmq.PULL)
        self._reports.setsockopt(zmq.RCVHWM, REPORT_QUEUE_MAX)
        self._reports.bind(self.reports_address)
        self._reader: asyncio.Task[None] | None = None

    def start(self, handler: Callable[[wire.Report], None], on_broken: Callable[[str], None]) -> None:
        """Hand each report to `handler`; `on_broken` hears why no more will come."""
        self._reader = asyncio.get_running_loop().create_task(self._read(handler, on_broken))

    async def _read(self, handler: Callable[[wire.Report], None], on_broken: Callable[[str], None]) -> None:
        try:
            while True:
                handler(wire.decode_report(await self._reports.recv()))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            on_broken(f"a report could not be handled: {error!r}")
            raise

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
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._reader
            self._reader = None
        self._reports.close(linger=0)
        self._commands.close(linger=0)
        self._context.term()
        self._private.remove()
