"""What the tests of buses share."""

import asyncio
import contextvars
import functools
import inspect
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest

from meshift.schemas import errors
from meshift.schemas.base import Message, pack_tokens
from meshift.schemas.errors import (
    MeshError,
)
from meshift.schemas.identity import FrontendRef, Owner
from meshift.schemas.instances import DispatchRequest, InstanceGone, StatusRequest
from meshift.schemas.limits import PAYLOAD_BYTES_MAX
from meshift.schemas.requests import Sampling, Submit, SubmitReply
from meshift.services.bus.base import Bus, Headers, Propagator, ServiceInfo
from meshift.services.bus.settings import BusLimits

DEADLINE_S = 5.0
"""For whatever should happen at once; far above what it takes."""

OWNER = Owner(instance_id="w1", incarnation=1)
FRONTEND = FrontendRef(frontend_id="f1", incarnation=1)
REPLY = SubmitReply(owner=OWNER)
ASK = StatusRequest()

# Just over, and just under, the limit once base64 has made 4 bytes of 3.
TOO_MANY_TOKENS = pack_tokens([7] * (PAYLOAD_BYTES_MAX * 3 // 16 + 1))
MANY_TOKENS = pack_tokens([7] * (PAYLOAD_BYTES_MAX * 3 // 16 - 256))

LEAF_ERRORS = [cls for cls in vars(errors).values() if inspect.isclass(cls) and issubclass(cls, MeshError)]


def numbered(number: int) -> InstanceGone:
    """A message that is told from the others by its number."""
    return InstanceGone(owner=OWNER, reason=str(number))


def submit(prompt: bytes) -> Submit:
    """A request with that prompt."""
    sampling = Sampling(max_new_tokens=1)
    return Submit(request_id="r", attempt=1, owner=OWNER, frontend=FRONTEND, prompt=prompt, sampling=sampling)


def dispatch_request(request_id: str = "r", demand: int = 1) -> DispatchRequest:
    """A request of a scheduler."""
    return DispatchRequest(request_id=request_id, attempt=1, frontend=FRONTEND, model="m", demand=demand)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for it."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.001)


class Mailbox:
    """A handler that keeps what it gets."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def __call__(self, message: Message) -> None:
        self.messages.append(message)

    async def take(self, count: int) -> list[Any]:
        """The first `count` messages, when they have come."""
        await until(lambda: len(self.messages) >= count)
        return self.messages[:count]

    @property
    def numbers(self) -> list[int]:
        """Of `numbered` messages."""
        return [int(message.reason) for message in self.messages]


class Trace(Propagator):
    """Carries a context variable."""

    def __init__(self) -> None:
        self.current: contextvars.ContextVar[str] = contextvars.ContextVar("trace", default="")

    def inject(self) -> Headers:
        return {"traceparent": self.current.get()} if self.current.get() else {}

    @contextmanager
    def attach(self, headers: Headers) -> Iterator[None]:
        token = self.current.set(headers.get("traceparent", ""))
        try:
            yield
        finally:
            self.current.reset(token)


class Buses:
    """Makes clients of one bus, and closes them."""

    def __init__(self, make: Callable[[str, BusLimits, Propagator | None], Bus]) -> None:
        self._make = make
        self._made: list[Bus] = []

    def new(self, name: str, *, propagator: Propagator | None = None, **limits: Any) -> Bus:
        """A client that isn't started."""
        bus = self._make(name, BusLimits(**limits), propagator)
        self._made.append(bus)
        return bus

    async def started(self, name: str, *, propagator: Propagator | None = None, **limits: Any) -> Bus:
        """A client that is."""
        bus = self.new(name, propagator=propagator, **limits)
        await self.start(bus, name)
        return bus

    async def start(self, bus: Bus, name: str) -> None:
        """Start it as a service."""
        await bus.start(ServiceInfo(name="tester", instance=name))

    async def close(self) -> None:
        """The end of a test."""
        for bus in self._made:
            await bus.close()


async def known(*buses: Bus) -> None:
    """Wait until the server knows what they subscribed to and serve."""
    for bus in buses:
        await bus.flush(timeout_s=DEADLINE_S)


def _on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run_test(self: "LoopSuite", *args: Any, **kwargs: Any) -> None:
        async def main() -> None:
            try:
                await test(self, *args, **kwargs)
            finally:
                for value in kwargs.values():
                    if isinstance(value, Buses):
                        await value.close()

        type(self).run_loop(main())

    return run_test


class LoopSuite:
    """A part of the suite. Tests are coroutines; `run_loop` runs each, and the closing of its clients, on one loop."""

    encodes: ClassVar[bool] = True
    """False for a bus that passes objects: it can't see wrong fields."""

    @staticmethod
    def run_loop(main: Coroutine[Any, Any, None]) -> None:
        """Run it to its end."""
        asyncio.run(main)

    def __init_subclass__(cls) -> None:
        for name in dir(cls):
            test = getattr(cls, name)
            if name.startswith("test_") and inspect.iscoroutinefunction(test):
                setattr(cls, name, _on_loop(test))

    @pytest.fixture
    def buses(self) -> Buses:
        raise NotImplementedError
