"""The sending end of `TcpTransport`: connections to receivers, and the patches of each transfer in order.

Connections to a receiver are kept and used again, each by one transfer at a time: as long as something of
that transfer is unanswered. So transfers neither hold up nor break one another, a final small patch finds a
warm connection, and order within a transfer is the order of one byte stream."""

import asyncio
import socket
from collections import deque
from contextlib import AsyncExitStack, suppress

from meshift.kv_memory.transport import frames, sockets
from meshift.kv_memory.transport.base import Patch, TransportError
from meshift.kv_memory.transport.compiled import CompiledStreams
from meshift.kv_memory.transport.end import retrieve
from meshift.kv_memory.transport.frames import FrameError
from meshift.kv_memory.transport.limits import ByteBudget, Pacer, TransportLimits
from meshift.kv_memory.transport.outgoing import OutgoingTransfers, Turns, check, reason_of

PEERS_KEPT_MAX = 1024
"""Receivers that are remembered without a connection: a restarted one has another port."""


class PayloadWriter:
    """How patches leave: all at one pace, and large payloads on threads of their own, if there are any."""

    def __init__(self, pacer: Pacer, compiled: CompiledStreams | None, stall_timeout_s: float) -> None:
        self._pacer = pacer
        self._compiled = compiled
        self._stall_timeout_s = stall_timeout_s

    async def write(self, sock: socket.socket, head: bytes, payload: memoryview) -> None:
        """Both. Raises OSError or TimeoutError."""
        stall_timeout_s = self._stall_timeout_s
        if self._compiled is None or not self._compiled.takes(len(payload)):
            await sockets.send(sock, head, payload, self._pacer, stall_timeout_s=stall_timeout_s)
            return
        await self._pacer.take(len(head))
        await sockets.send_small(sock, head, stall_timeout_s=stall_timeout_s)
        await self._compiled.send(sock, payload, stall_timeout_s=stall_timeout_s)


class Connection:
    """One connection to a receiver, with the patches on it that are not answered yet."""

    def __init__(self, sock: socket.socket, limits: TransportLimits, writer: PayloadWriter) -> None:
        self.failure: str | None = None
        """Why it is of no use any more."""
        self._sock = sock
        self._limits = limits
        self._writer = writer
        self._sequence = 0
        self._unanswered: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._writing = False
        self._closer: asyncio.TimerHandle | None = None
        self._reader = asyncio.get_running_loop().create_task(self._read_answers())

    async def write(self, patch: Patch, token: str) -> "asyncio.Future[None]":
        """Put a patch on the way; its answer. One at a time. Raises TransportError."""
        if self.failure is not None:
            raise TransportError(self.failure)
        head = frames.pack_patch(patch, token, self._sequence)
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unanswered.append((self._sequence, answer))
        self._sequence += 1
        self._writing = True
        try:
            await self._writer.write(self._sock, head, memoryview(patch.payload).cast("B"))
        except OSError as error:
            # What the reader knows tells more than that the connection is gone.
            if isinstance(error, ConnectionError):
                with suppress(TransportError, TimeoutError):
                    await asyncio.wait_for(asyncio.shield(answer), self._limits.stall_timeout_s)
            self.fail(reason_of(error))
            raise TransportError(self.failure) from None
        except BaseException:
            self.fail("given up in the middle of a patch")
            raise
        finally:
            self._writing = False
            answer.add_done_callback(retrieve)
            self._close_if_over()
        return answer

    def fail(self, reason: str) -> None:
        """End it: everything unanswered fails. Idempotent: the first reason stays."""
        if self.failure is None:
            self.failure = reason
            self.keep()
            sockets.hang_up(self._sock)
        while self._unanswered:
            _, answer = self._unanswered.popleft()
            if not answer.done():
                answer.set_exception(TransportError(self.failure))

    def rest(self, idle_timeout_s: float) -> None:
        """Nobody uses it: close it after that time, unless `keep` is called."""
        loop = asyncio.get_running_loop()
        self._closer = loop.call_later(idle_timeout_s, self.fail, "idle for too long")

    def keep(self) -> None:
        """Somebody uses it."""
        if self._closer is not None:
            self._closer.cancel()
            self._closer = None

    async def join(self) -> None:
        """Return when nothing watches the socket any more."""
        self._reader.cancel()
        await asyncio.wait([self._reader])
        self._close_if_over()

    async def _read_answers(self) -> None:
        reason = "closed"
        try:
            while True:
                await self._read_answer()
        except (FrameError, OSError, TransportError) as error:
            reason = reason_of(error)
        finally:
            self.fail(reason)
            asyncio.get_running_loop().call_soon(self._close_if_over)

    async def _read_answer(self) -> None:
        raw = bytearray(frames.ANSWER_HEAD_BYTES)
        loop, view = asyncio.get_running_loop(), memoryview(raw)
        # The first byte may take any time: sends have deadlines of their own.
        count = await loop.sock_recv_into(self._sock, view)
        if not count:
            raise ConnectionError("closed by the peer")
        await sockets.receive(self._sock, view[count:], stall_timeout_s=self._limits.stall_timeout_s)
        head = frames.unpack_answer_head(raw)
        text = bytearray(head.reason_bytes)
        await sockets.receive(self._sock, memoryview(text), stall_timeout_s=self._limits.stall_timeout_s)
        if not self._unanswered or self._unanswered[0][0] != head.sequence:
            raise FrameError(f"an answer to patch {head.sequence}, which doesn't wait for one")
        if not head.applied:
            raise TransportError(text.decode(errors="replace") or "refused")
        _, answer = self._unanswered.popleft()
        if not answer.done():
            answer.set_result(None)

    def _close_if_over(self) -> None:
        if self._reader.done() and not self._writing:
            self._sock.close()


class Peer:
    """The connections to one receiver."""

    def __init__(self, host: str, port: int, limits: TransportLimits, writer: PayloadWriter) -> None:
        self._host, self._port = host, port
        self._limits = limits
        self._writer = writer
        self.budget = ByteBudget(limits.in_flight_bytes_max)
        """Of the payloads that it hasn't answered."""
        self._free = asyncio.Semaphore(limits.connections_per_peer_max)
        self._idle: list[Connection] = []
        self._all: dict[Connection, None] = {}

    async def take(self) -> Connection:
        """A connection for one transfer, the last used first. Raises TransportError."""
        await self._free.acquire()
        try:
            return self._idle_one() or await self._connect()
        except BaseException:
            self._free.release()
            raise

    def give_back(self, connection: Connection) -> None:
        """That transfer has nothing on it any more."""
        self._free.release()
        if connection.failure is None:
            self._idle.append(connection)
            connection.rest(self._limits.idle_timeout_s)
        self._sweep()

    @property
    def connections(self) -> list[Connection]:
        """Those that live."""
        self._sweep()
        return list(self._all)

    def _idle_one(self) -> Connection | None:
        self._sweep()
        if not self._idle:
            return None
        connection = self._idle.pop()
        connection.keep()
        return connection

    async def _connect(self) -> Connection:
        try:
            sock = await sockets.connect(self._host, self._port, timeout_s=self._limits.connect_timeout_s)
        except OSError as error:
            raise TransportError(f"can't reach {self._host}:{self._port}: {reason_of(error)}") from None
        connection = Connection(sock, self._limits, self._writer)
        self._all[connection] = None
        return connection

    def _sweep(self) -> None:
        self._idle = [connection for connection in self._idle if connection.failure is None]
        for connection in [connection for connection in self._all if connection.failure is not None]:
            del self._all[connection]


class Stream:
    """One transfer at its sending end."""

    def __init__(self, peer: Peer) -> None:
        self.broken: str | None = None
        self.users = 0
        """Sends that run."""
        self._peer = peer
        self._turns = Turns()
        self._connection: Connection | None = None
        self._on_the_way = 0

    def break_(self, reason: str) -> None:
        """No further patch leaves, and those on the way fail."""
        if self.broken is None:
            self.broken = reason
        self._turns.fail(self.broken)
        if self._connection is not None:
            self._connection.fail(reason)

    async def send(self, patch: Patch, token: str) -> None:
        """Returns when it is applied. Raises TransportError."""
        size = memoryview(patch.payload).nbytes
        async with AsyncExitStack() as afterwards:
            async with self._turns.turn():
                check(self, patch.transfer_id)
                await self._peer.budget.take(size)
                afterwards.callback(self._peer.budget.give_back, size)
                connection = await self._use()
                afterwards.callback(self._done)
                answer = await connection.write(patch, token)
            await answer
            # An earlier patch may have met its deadline just when its answer came.
            check(self, patch.transfer_id)

    async def _use(self) -> Connection:
        if self._connection is None:
            connection = await self._peer.take()
            if self.broken is not None:
                connection.fail(self.broken)
                self._peer.give_back(connection)
                raise TransportError(self.broken)
            self._connection = connection
        self._on_the_way += 1
        return self._connection

    def _done(self) -> None:
        self._on_the_way -= 1
        if not self._on_the_way and self._connection is not None:
            if self.broken is not None:
                self._connection.fail(self.broken)
            self._peer.give_back(self._connection)
            self._connection = None


class TcpSender:
    """Sends to any number of receivers."""

    def __init__(self, limits: TransportLimits, writer: PayloadWriter) -> None:
        self._limits = limits
        self._writer = writer
        self._peers: dict[tuple[str, int], Peer] = {}
        self._streams: OutgoingTransfers[Stream] = OutgoingTransfers()

    @property
    def connection_count(self) -> int:
        """Connections that live."""
        return sum(len(peer.connections) for peer in self._peers.values())

    async def send(self, target: tuple[str, int], token: str, patch: Patch, *, timeout_s: float) -> None:
        """As `Transport.send`."""
        if memoryview(patch.payload).nbytes > self._limits.patch_bytes_max:
            raise TransportError(f"a patch is larger than {self._limits.patch_bytes_max} bytes")
        stream = self._streams.get(token, lambda: Stream(self._peer(target)))
        async with self._streams.sending(stream, patch.transfer_id, timeout_s):
            await stream.send(patch, token)

    async def close(self) -> None:
        """Everything that runs fails, and what still comes."""
        connections = [connection for peer in self._peers.values() for connection in peer.connections]
        for stream in self._streams:
            stream.break_("closed")
        for connection in connections:
            connection.fail("closed")
        for connection in connections:
            await connection.join()

    def _peer(self, target: tuple[str, int]) -> Peer:
        if target not in self._peers:
            if len(self._peers) >= PEERS_KEPT_MAX:
                self._peers = {target: peer for target, peer in self._peers.items() if peer.connections}
            self._peers[target] = Peer(*target, self._limits, self._writer)
        return self._peers[target]
