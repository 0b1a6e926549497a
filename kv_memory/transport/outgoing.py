"""Transfers at their sending end: which are broken, and how a send ends that doesn't end well."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from meshift.kv_memory.transport.base import TransportError

TRANSFERS_KEPT_MAX = 4096
"""That a sending end remembers, to know the broken ones; the oldest use goes first."""


class OutgoingTransfer(Protocol):
    """One, as far as all transports have it."""

    broken: str | None
    """Why nothing more of it is sent."""
    users: int
    """Sends that run."""

    def break_(self, reason: str) -> None:
        """No further patch leaves, and those on the way fail. The first reason stays."""


class Turns:
    """Strict order among the sends of one transfer. A turn comes when the one before was passed on; a send that
    leaves before never passes it on, so that none behind it can slip through: its transfer must break, and
    `fail` ends the waiting. (A lock lets a newcomer pass one that is about to leave.)"""

    def __init__(self) -> None:
        self._drawn = 0
        self._serving = 0
        self._waiting: dict[int, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Around what must happen in the order of the calls. Raises TransportError after `fail`."""
        number = self._drawn
        self._drawn += 1
        if number != self._serving:
            self._waiting[number] = asyncio.get_running_loop().create_future()
            try:
                await self._waiting[number]
            finally:
                del self._waiting[number]
        yield
        self._serving += 1
        following = self._waiting.get(self._serving)
        if following is not None and not following.done():
            following.set_result(None)

    def fail(self, reason: str) -> None:
        """Nobody's turn comes any more."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(TransportError(reason))


@dataclass(slots=True)
class Outgoing:
    """One transfer; an `OutgoingTransfer`. All of its sends but one wait for their turn."""

    turns: Turns = field(default_factory=Turns)
    broken: str | None = None
    users: int = 0

    def break_(self, reason: str) -> None:
        """As `OutgoingTransfer.break_`."""
        self.broken = self.broken or reason
        self.turns.fail(self.broken)


TransferT = TypeVar("TransferT", bound=OutgoingTransfer)


class OutgoingTransfers(Generic[TransferT]):
    """All of one sending end, by their token."""

    def __init__(self) -> None:
        self._transfers: OrderedDict[str, TransferT] = OrderedDict()

    def __iter__(self) -> Iterator[TransferT]:
        return iter(list(self._transfers.values()))

    def get(self, token: str, make: Callable[[], TransferT]) -> TransferT:
        """The transfer of that token, made if it is new."""
        transfer = self._transfers.get(token)
        if transfer is None:
            transfer = self._transfers[token] = make()
            self._evict()
        self._transfers.move_to_end(token)
        return transfer

    @asynccontextmanager
    async def sending(self, transfer: TransferT, transfer_id: str, timeout_s: float) -> AsyncIterator[None]:
        """Around a send: whatever ends it early, its deadline included, breaks the transfer. Raises
        TransportError."""
        check(transfer, transfer_id)
        transfer.users += 1
        try:
            if timeout_s <= 0:
                raise TimeoutError
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            transfer.break_(f"no answer within {timeout_s} s")
            raise TransportError(transfer.broken) from None
        except BaseException as error:
            transfer.break_(reason_of(error))
            raise
        finally:
            transfer.users -= 1

    def _evict(self) -> None:
        if len(self._transfers) > TRANSFERS_KEPT_MAX:
            idle = next((token for token, transfer in self._transfers.items() if not transfer.users), None)
            if idle is not None:
                del self._transfers[idle]


def check(transfer: OutgoingTransfer, transfer_id: str) -> None:
    """Raises TransportError if it is broken."""
    if transfer.broken is not None:
        raise TransportError(f"transfer {transfer_id} is broken: {transfer.broken}")


def reason_of(error: BaseException) -> str:
    """In words."""
    if isinstance(error, TimeoutError):
        return "no progress in time"
    return str(error) or type(error).__name__
