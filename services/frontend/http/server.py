"""Uvicorn on the running loop, started and stopped by the program and not by signals."""

import asyncio
import contextlib
import socket
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp

START_TIMEOUT_S = 30.0

CANCEL_TIMEOUT_S = 10.0
"""What requests get to clean up when they are cancelled at the end of the grace."""


class ServerStartError(Exception):
    """The application didn't start; the log says why."""


DATE_S = 1.0
"""How often the `Date` of answers is set anew."""


class _Server(uvicorn.Server):
    """Tells when it is up, and leaves the process alone: no signal handlers, no exit."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        """Serve no more. Idempotent."""
        self.should_exit = True
        self._leaving.set()

    async def main_loop(self) -> None:
        """Uvicorn's own wakes the process ten times a second, to see whether it is to leave."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_S):
                    await self._leaving.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit as error:
            raise ServerStartError("the HTTP application did not start") from error
        self.up.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        # It cancels what is left after the grace, but doesn't wait for it.
        if self.server_state.tasks:
            await asyncio.wait(set(self.server_state.tasks), timeout=CANCEL_TIMEOUT_S)


class HttpServer:
    """One listening server. `start`, then `stop`; not reusable."""

    def __init__(self, app: ASGIApp, host: str, port: int, *, keep_alive_s: int = 75, grace_s: int = 10) -> None:
        """`port` 0 takes a free one. `grace_s`: what requests in flight get when it stops; then they are cancelled."""
        config = uvicorn.Config(
            app,
            lifespan="on",
            loop="none",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=grace_s,
        )
        self._server = _Server(config)
        self._address = (host, port)
        self._port: int | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port that it listens on; known once it has started."""
        assert self._port is not None, "not started"
        return self._port

    async def start(self) -> None:
        """Returns when connections are accepted. Raises OSError if the address can't be had, `ServerStartError` if the
        application fails, TimeoutError."""
        host, port = self._address
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=2048)
        self._port = int(listener.getsockname()[1])
        self._task = asyncio.ensure_future(self._server.serve(sockets=[listener]))
        up = asyncio.ensure_future(self._server.up.wait())
        try:
            await asyncio.wait({self._task, up}, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            up.cancel()
            if not self._server.up.is_set():
                await self._abandon(self._task, listener)
        if not self._server.up.is_set():
            if not self._task.cancelled():
                self._task.result()
            raise TimeoutError("the HTTP application did not start in time")

    async def stop(self) -> None:
        """Refuse new connections, let requests in flight end, cancel them after the grace. Idempotent."""
        self._server.leave()
        await self.wait()

    async def wait(self) -> None:
        """Returns when it has stopped."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def _abandon(self, task: asyncio.Task[None], listener: socket.socket) -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        listener.close()


async def serve(
    app: ASGIApp,
    host: str,
    port: int,
    *,
    stop: asyncio.Event,
    started: asyncio.Event | None = None,
    keep_alive_s: int = 75,
    grace_s: int = 10,
) -> None:
    """Serve until `stop` is set, or this call is cancelled; `started` is set once connections are accepted."""
    server = HttpServer(app, host, port, keep_alive_s=keep_alive_s, grace_s=grace_s)
    await server.start()
    if started is not None:
        started.set()
    try:
        await stop.wait()
    finally:
        await server.stop()
