"""The connection to NATS: made in any start order, found again for ever, replaced when the library gives it up."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any

from meshift.schemas.errors import PeerTimeout
from meshift.services.bus.nats_client import BusClient
from meshift.services.bus.nats_library import Server, errors
from meshift.services.bus.nats_settings import NatsSettings
from meshift.services.bus.receiver import Reception
from meshift.services.bus.tasks import end_task

logger = logging.getLogger("meshift.bus")

DISCARD_TIMEOUT_S = 1.0
"""For closing a client that failed."""

ERRORS_TOLD_MAX = 3
"""Different errors remembered. One isn't enough: a refused password may end in a connection reset."""

CLOSED_CHECK_S = 1.0
"""How often to look whether the library has closed the client: some of its paths do it without a callback."""

Attach = Callable[[BusClient], Awaitable[None]]


class NatsConnection:
    """One nats-py client at a time. `attach` gives each new one its subscriptions; nats-py itself repeats them when
    it reconnects."""

    def __init__(self, settings: NatsSettings, reception: Reception, attach: Attach) -> None:
        self._settings = settings
        self._reception = reception
        self._attach = attach
        # Seeded by the name: clients of one mesh come back spread out, and each run the same.
        self._rng = random.Random(settings.client_name)
        self._attempts = 0
        self._errors: dict[str, None] = {}
        self._client: BusClient | None = None
        self._ready = asyncio.Event()
        self._lost = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    @property
    def payload_bytes_max(self) -> int | None:
        """The server's limit for headers and body; None before it is known."""
        return self._client.max_payload if self._client is not None else None

    @property
    def connected(self) -> bool:
        """Whether a server listens now, as far as is known."""
        return self._client is not None and self._client.is_connected

    async def open(self) -> None:
        """Connect and attach. Raises `PeerTimeout`."""
        loop, timeout_s = asyncio.get_running_loop(), self._settings.connect_timeout_s
        establishing = loop.create_task(self._establish())
        in_time = False
        try:
            await asyncio.wait([establishing], timeout=timeout_s)
            in_time = establishing.done()
        finally:
            await end_task(establishing)
            if not in_time:
                await self._drop_client()
        if not in_time:
            servers = ", ".join(self._settings.servers)
            raise PeerTimeout(f"no NATS connection to {servers} within {timeout_s} s; {self._errors_text()}")
        establishing.result()
        self._keeper = loop.create_task(self._keep())

    @property
    def client(self) -> BusClient | None:
        """The client, once it has been attached."""
        return self._client

    async def ready(self) -> BusClient:
        """The client, once it is connected."""
        while True:
            if self._client is not None and self._client.is_connected and self._ready.is_set():
                return self._client
            self._ready.clear()
            await self._ready.wait()

    async def close(self) -> None:
        """Send what nats-py has buffered, and leave."""
        if self._keeper is not None:
            await end_task(self._keeper)
        await self._drop_client()

    async def _establish(self) -> None:
        """Connect, however long it takes."""
        while True:
            client = BusClient()
            try:
                await client.connect(**self._options())
                await self._attach(client)
            except (errors.Error, OSError, TimeoutError) as error:
                await self._discard(client)
                await self._on_error(error)
                await asyncio.sleep(self._next_wait_s())
                continue
            except BaseException:
                await self._discard(client)
                raise
            self._client = client
            self._on_connected()
            return

    async def _keep(self) -> None:
        """Replace a client that was closed: nats-py does that on most errors that a server reports."""
        while True:
            self._lost.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSED_CHECK_S):
                    await self._lost.wait()
            if self._client is not None and self._client.is_closed:
                await self._replace(self._client)

    async def _replace(self, closed: BusClient) -> None:
        self._reception.log.report("closed", f"NATS connection closed ({closed.last_error!r}); making a new one")
        try:
            await self._establish()
            self._reception.counters.reconnects += 1
        except Exception as error:
            # Nobody awaits this task: what is unforeseen here must be seen, and must not end the attempts.
            self._reception.log.report("replace", "making a new NATS connection failed", error)
            await asyncio.sleep(self._next_wait_s())

    def _on_connected(self) -> None:
        self._attempts = 0
        self._errors.clear()
        self._ready.set()

    def _next_wait_s(self) -> float:
        settings = self._settings
        wait_s = min(settings.reconnect_wait_s_max, settings.reconnect_wait_s_min * 2.0 ** min(self._attempts, 30))
        self._attempts += 1
        return wait_s * (0.5 + self._rng.random())

    async def _on_error(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        self._errors.pop(text, None)
        self._errors[text] = None
        if len(self._errors) > ERRORS_TOLD_MAX:
            del self._errors[next(iter(self._errors))]
        self._reception.log.report(("nats", type(error)), f"NATS: {text}")

    def _errors_text(self) -> str:
        return "last errors: " + ("; ".join(self._errors) or "none")

    async def _on_reconnected(self) -> None:
        self._reception.counters.reconnects += 1
        logger.info("bus client %s: reconnected to NATS", self._settings.client_name)
        self._on_connected()

    async def _on_closed(self) -> None:
        self._lost.set()

    def _choose_server(self, servers: list[Server], info: dict[str, Any]) -> tuple[Server, float]:
        first = self._attempts == 0
        wait_s = self._next_wait_s()
        return servers[self._attempts % len(servers)], 0.0 if first else wait_s

    async def _drop_client(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await self._discard(client)

    async def _discard(self, client: BusClient) -> None:
        # Its socket and tasks must go, whatever state it is in and whatever it thinks of being closed there.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(DISCARD_TIMEOUT_S):
                await client.close()

    def _options(self) -> dict[str, Any]:
        settings = self._settings
        return {
            "servers": list(settings.servers),
            "name": settings.client_name,
            "user": settings.user,
            "password": settings.password,
            "token": settings.token,
            "user_credentials": settings.credentials_path,
            "connect_timeout": settings.attempt_timeout_s,
            "reconnect_time_wait": settings.reconnect_wait_s_min,
            "max_reconnect_attempts": -1,
            "dont_randomize": True,
            "ping_interval": settings.ping_interval_s,
            "reconnect_to_server_handler": self._choose_server,
            "error_cb": self._on_error,
            "reconnected_cb": self._on_reconnected,
            "closed_cb": self._on_closed,
        }
