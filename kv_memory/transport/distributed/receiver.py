"""The receiving end of `DistributedTransport`: links from senders, and the patches that they announce."""

import asyncio
import logging
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass

from meshift.kv_memory.checksum import crc32
from meshift.kv_memory.staging import StagingPool
from meshift.kv_memory.transport.base import Patch, TransportError
from meshift.kv_memory.transport.distributed.access import Access, HandshakeLimits
from meshift.kv_memory.transport.distributed.link import Announcement, Kind, Link, unpack_announcement
from meshift.kv_memory.transport.distributed.receiving import Receiving
from meshift.kv_memory.transport.distributed.table import IllegalTransition, ReceiverEvent, ReceiverState
from meshift.kv_memory.transport.frames import REASON_BYTES_MAX, FrameError
from meshift.kv_memory.transport.incoming import OpenTransfer, OpenTransfers, ReceiveMemory, not_open
from meshift.kv_memory.transport.limits import TransportLimits

ARRIVALS_MAX = 256
"""Patches worked on at a time; more are refused."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Arrival:
    """A patch that a sender has announced."""

    number: int
    link: Link
    announcement: Announcement
    transfer: OpenTransfer
    exchange: Receiving


class DistributedReceiver:
    """Takes links, from `start` until `close`."""

    def __init__(self, access: Access, limits: TransportLimits, handshake: HandshakeLimits) -> None:
        self.transfers = OpenTransfers()
        self.pool = StagingPool(limits.receive_bytes_max)
        self._memory = ReceiveMemory(self.pool)
        self._access = access
        self._limits = limits
        self._handshake = handshake
        self._server: asyncio.Server | None = None
        self._links: OrderedDict[Link, None] = OrderedDict()
        self._arrivals: dict[tuple[Link, int], Arrival] = {}
        self._tasks: dict[asyncio.Task[None], Arrival] = {}
        self._closed = False

    @property
    def link_count(self) -> int:
        """Strangers included."""
        return len(self._links)

    async def start(self, host: str, port: int) -> int:
        """Listen; the port, which the system chooses if it is 0. Raises OSError."""
        self._server = await asyncio.start_server(self._accept, host, port)
        chosen: int = self._server.sockets[0].getsockname()[1]
        return chosen

    async def close(self) -> None:
        """No handler is called any more; senders are told; nothing of the library writes here."""
        self._closed = True
        self.transfers.clear()
        if self._server is not None:
            self._server.close()
        for task, arrival in list(self._tasks.items()):
            waits_for_memory = arrival.exchange.state is ReceiverState.START
            arrival.exchange.handle(ReceiverEvent.GIVE_UP, "closed")
            if waits_for_memory:
                task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        links = list(self._links)
        for link in links:
            link.fail("closed")
        for link in links:
            await link.join()

    # ---- links ----

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closed:
            writer.close()
            return
        self._make_room()
        link = Link(
            reader,
            writer,
            on_message=self._take,
            on_lost=self._lose,
            first_timeout_s=self._limits.stranger_timeout_s,
            stall_timeout_s=self._limits.stall_timeout_s,
        )
        self._links[link] = None

    def _make_room(self) -> None:
        strangers = [link for link in self._links if not link.trusted]
        if len(strangers) >= self._limits.strangers_max:
            strangers[0].fail("too many strangers")
        elif len(self._links) >= self._limits.connections_max:
            next(iter(self._links)).fail("too many links")

    def _lose(self, link: Link, reason: str) -> None:
        self._links.pop(link, None)
        for (owner, _), arrival in list(self._arrivals.items()):
            if owner is link:
                arrival.exchange.handle(ReceiverEvent.WITHDRAWN, reason)
        if not any(owner is link for owner, _ in self._arrivals) and link.peer:
            self._access.groups.discard(link.peer, False)

    def _take(self, link: Link, kind: Kind, number: int, body: bytes) -> None:
        if kind is Kind.ANNOUNCE:
            self._announced(link, number, unpack_announcement(body))
            return
        arrival = self._arrivals.get((link, number))
        try:
            if kind is Kind.ENTER and arrival is None:
                # Over at this end: the sender mustn't wait with its gate locked.
                link.say(Kind.REFUSE, number, b"over")
            elif kind is Kind.ENTER and arrival is not None:
                self._enter(arrival)
            elif kind not in (Kind.WITHDRAW, Kind.MEET):
                raise FrameError(f"a sender says {kind.name}")
            elif arrival is not None and kind is Kind.WITHDRAW:
                arrival.exchange.handle(ReceiverEvent.WITHDRAWN)
            elif arrival is not None:
                arrival.exchange.meet(body)
        except IllegalTransition as error:
            raise FrameError(str(error)) from None

    def _enter(self, arrival: Arrival) -> None:
        if self.transfers.is_open(arrival.transfer):
            arrival.exchange.asked()
        else:
            arrival.exchange.handle(ReceiverEvent.GIVE_UP, not_open(arrival.transfer.transfer_id))

    # ---- patches ----

    def _announced(self, link: Link, number: int, announcement: Announcement) -> None:
        transfer = self.transfers.find(announcement.transfer_id, announcement.head.token)
        if transfer is None:
            if not link.trusted:
                raise FrameError("a stranger")
            self._refuse(link, number, not_open(announcement.transfer_id))
            return
        link.trust(announcement.location)
        if (link, number) in self._arrivals or announcement.location != link.peer:
            raise FrameError("an exchange that is another's")
        refusal = self._unfit(announcement)
        if refusal is not None:
            self._refuse(link, number, refusal)
            return
        exchange = Receiving(number, announcement, link, self._access, self._handshake, self._limits.stall_timeout_s)
        arrival = self._arrivals[link, number] = Arrival(number, link, announcement, transfer, exchange)
        task = asyncio.get_running_loop().create_task(self._receive(arrival))
        self._tasks[task] = arrival
        task.add_done_callback(self._forget)

    def _unfit(self, announcement: Announcement) -> str | None:
        size = announcement.head.payload_bytes
        if size > self._limits.patch_bytes_max:
            return f"a patch of {size} bytes; {self._limits.patch_bytes_max} are allowed"
        if len(self._arrivals) >= ARRIVALS_MAX:
            return f"{ARRIVALS_MAX} patches are under way"
        return None

    def _refuse(self, link: Link, number: int, refusal: str) -> None:
        link.say(Kind.REFUSE, number, refusal.encode(errors="replace")[:REASON_BYTES_MAX])

    def _forget(self, task: asyncio.Task[None]) -> None:
        arrival = self._tasks.pop(task)
        del self._arrivals[arrival.link, arrival.number]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("receiving a patch failed", exc_info=error)

    async def _receive(self, arrival: Arrival) -> None:
        """What goes wrong in the exchange, its sender knows already."""
        try:
            async with asyncio.timeout(self._limits.stall_timeout_s):
                buffer = await self._memory.acquire(arrival.announcement.head.payload_bytes)
        except TimeoutError:
            arrival.exchange.handle(ReceiverEvent.GIVE_UP, "no memory to receive it in time")
            return
        try:
            await self._fill(arrival, buffer.view)
        finally:
            self._memory.release(buffer)

    async def _fill(self, arrival: Arrival, view: memoryview) -> None:
        if view.nbytes:
            arrival.exchange.begin(view)
            with suppress(TransportError):
                await arrival.exchange.over
                self._apply(arrival, view)
        else:
            self._apply(arrival, view)

    def _apply(self, arrival: Arrival, view: memoryview) -> None:
        transfer, head = arrival.transfer, arrival.announcement.head
        patch = Patch(transfer.transfer_id, head.watermark, head.generation, head.rectangle, view, head.checksum)
        refusal = self.transfers.apply(transfer, patch, crc32(view))
        if refusal is None:
            arrival.link.say(Kind.APPLIED, arrival.number)
        else:
            self._refuse(arrival.link, arrival.number, refusal)
