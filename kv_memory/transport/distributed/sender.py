"""The sending end of `DistributedTransport`: links to receivers, and one patch of each transfer at a time."""

import asyncio
import itertools
from contextlib import suppress

from meshift.kv_memory.transport import frames
from meshift.kv_memory.transport.base import Address, Patch, TransportError
from meshift.kv_memory.transport.distributed.access import Access, HandshakeLimits
from meshift.kv_memory.transport.distributed.link import Kind, Link, pack_announcement, text_of
from meshift.kv_memory.transport.distributed.sending import Parcel, Sending
from meshift.kv_memory.transport.distributed.table import IllegalTransition, SenderEvent
from meshift.kv_memory.transport.end import host_and_port
from meshift.kv_memory.transport.frames import FrameError
from meshift.kv_memory.transport.limits import Pacer, TransportLimits
from meshift.kv_memory.transport.outgoing import Outgoing, OutgoingTransfers, check, reason_of

EVENTS = {
    Kind.ENTERED: SenderEvent.ENTERED,
    Kind.BUSY: SenderEvent.BUSY,
    Kind.FREE: SenderEvent.FREE,
    Kind.APPLIED: SenderEvent.APPLIED,
}
"""What a receiver says without a body."""

LINKS_MAX = 1024
"""To receivers; one that isn't used makes room."""


class DistributedSender:
    """Sends to any number of receivers."""

    def __init__(self, access: Access, limits: TransportLimits, handshake: HandshakeLimits) -> None:
        self.held_off = 0
        """How often a receiver sent a piece back because inference was in its gate."""
        self._access = access
        self._limits = limits
        self._handshake = handshake
        self._pacer = Pacer(limits.bytes_per_s)
        self._transfers: OutgoingTransfers[Outgoing] = OutgoingTransfers()
        self._links: dict[str, asyncio.Task[Link]] = {}
        self._exchanges: dict[int, tuple[Link, Sending]] = {}
        self._numbers = itertools.count()

    @property
    def link_count(self) -> int:
        """Those that live, and those that are being made."""
        return len(self._links)

    async def send(self, own_location: str, address: Address, patch: Patch, *, timeout_s: float) -> None:
        """As `Transport.send`. What fails or is cancelled while the payload is in the library returns when it has left
        that, after `crossing_timeout_s` at most."""
        transfer = self._transfers.get(address.token, Outgoing)
        async with self._transfers.sending(transfer, patch.transfer_id, timeout_s), transfer.turns.turn():
            check(transfer, patch.transfer_id)
            await self._send(own_location, address, patch)

    async def close(self) -> None:
        """What runs fails; nothing of it is in the library afterwards."""
        for transfer in self._transfers:
            transfer.break_("closed")
        exchanges = [exchange for _, exchange in self._exchanges.values()]
        for exchange in exchanges:
            exchange.give_up("closed")
        if exchanges:
            await asyncio.wait([exchange.over for exchange in exchanges])
        links, self._links = list(self._links.values()), {}
        for connecting in links:
            connecting.cancel()
        for made in await asyncio.gather(*links, return_exceptions=True):
            if isinstance(made, Link):
                made.fail("closed")
                await made.join()

    async def _send(self, own_location: str, address: Address, patch: Patch) -> None:
        payload = memoryview(patch.payload).cast("B")
        if payload.nbytes > self._limits.patch_bytes_max:
            raise TransportError(f"a patch is larger than {self._limits.patch_bytes_max} bytes")
        number = next(self._numbers)
        head = frames.pack_patch(patch, address.token, number)
        link = await self._link(address.location)
        key = self._access.groups.key_of(address.location, True)
        announcement = pack_announcement(head, own_location, key, self._handshake.piece_bytes)
        parcel = Parcel(announcement, payload, address.location)
        exchange = Sending(number, parcel, link, self._access, self._handshake, self._pacer)
        self._exchanges[number] = link, exchange
        try:
            await self._run(exchange, own_location)
        finally:
            del self._exchanges[number]
            self.held_off += exchange.held_off

    async def _run(self, exchange: Sending, own_location: str) -> None:
        exchange.begin(own_location)
        try:
            await asyncio.shield(exchange.over)
        except BaseException as error:
            exchange.give_up(reason_of(error))
            while not exchange.over.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([exchange.over])
            raise

    # ---- links ----

    async def _link(self, location: str) -> Link:
        """To that receiver, made if there is none. Raises TransportError."""
        making = self._links.get(location)
        if making is None:
            if len(self._links) >= LINKS_MAX:
                self._drop_unused()
            making = self._links[location] = asyncio.get_running_loop().create_task(self._connect(location))
            making.add_done_callback(lambda made: self._made(location, made))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            if making.cancelled():
                raise TransportError("closed") from None
            raise

    async def _connect(self, location: str) -> Link:
        host, port = host_and_port(location)
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                reader, writer = await asyncio.open_connection(host, port)
        except OSError as error:
            raise TransportError(f"can't reach {location}: {reason_of(error)}") from None
        link = Link(
            reader,
            writer,
            on_message=self._take,
            on_lost=self._lose,
            first_timeout_s=None,
            stall_timeout_s=self._limits.stall_timeout_s,
        )
        link.trust(location)
        return link

    def _made(self, location: str, making: "asyncio.Task[Link]") -> None:
        failed = making.cancelled() or making.exception() is not None
        if failed and self._links.get(location) is making:
            del self._links[location]

    def _drop_unused(self) -> None:
        used = {link.peer for link, _ in self._exchanges.values()}
        for location, making in list(self._links.items()):
            if location not in used and making.done():
                making.result().fail("another is used")
                return

    def _lose(self, link: Link, reason: str) -> None:
        self._links.pop(link.peer, None)
        mine = [exchange for owner, exchange in self._exchanges.values() if owner is link]
        for exchange in mine:
            exchange.give_up(reason)
        if all(exchange.over.done() for exchange in mine):
            self._access.groups.discard(link.peer, True)

    def _take(self, link: Link, kind: Kind, number: int, body: bytes) -> None:
        owner, exchange = self._exchanges.get(number, (None, None))
        if exchange is None:
            return
        try:
            if owner is not link:
                raise FrameError("an exchange that is another's")
            if kind is Kind.READY:
                exchange.ready(text_of(body))
            elif kind is Kind.MEET:
                exchange.meet(body)
            elif kind is Kind.REFUSE:
                exchange.handle(SenderEvent.REFUSED, body.decode(errors="replace") or "refused")
            elif kind in EVENTS:
                exchange.handle(EVENTS[kind])
            else:
                raise FrameError(f"a receiver says {kind.name}")
        except IllegalTransition as error:
            raise FrameError(str(error)) from None
