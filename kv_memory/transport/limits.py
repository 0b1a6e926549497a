"""The bounds and deadlines of a transport over a network, all named, and two ways to wait for room."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class TransportLimits:
    """The same for all transfers of one transport."""

    bytes_per_s: float | None = None
    """What this end sends at most, all its transfers together; None for as fast as it goes."""
    patch_bytes_max: int = 256 * MIB
    """A larger payload is neither sent nor received."""
    in_flight_bytes_max: int = 256 * MIB
    """Payloads on the way to one receiver, not yet acknowledged; further sends wait."""
    receive_bytes_max: int = 512 * MIB
    """Memory for payloads that arrive; further ones wait in the network, at their sender's cost."""
    connect_timeout_s: float = 5.0
    stall_timeout_s: float = 10.0
    """A peer that moves nothing for so long, in the middle of something, is given up."""
    stranger_timeout_s: float = 5.0
    """A connection that has presented no token by then is dropped."""
    idle_timeout_s: float = 60.0
    """A sending end closes a connection that it hasn't used for so long; a receiving end after four times
    that."""
    connections_per_peer_max: int = 8
    """To one receiver: transfers that have something in flight at a time; others wait."""
    connections_max: int = 256
    """That a receiving end keeps; more are dropped."""
    strangers_max: int = 32
    """Connections without a token; one more drops the oldest."""

    def __post_init__(self) -> None:
        if self.bytes_per_s is not None and self.bytes_per_s <= 0:
            raise ValueError(f"a rate of {self.bytes_per_s} bytes/s")
        if self.receive_bytes_max < self.patch_bytes_max:
            raise ValueError("a patch of the largest size has no room to be received")


class ByteBudget:
    """A number of bytes that may be out at a time; who asks first is served first. One loop uses it."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int) -> None:
        """Returns when there is room. What is larger than the whole budget passes alone."""
        if not self._waiting and self._fits(size):
            self._used_bytes += size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._used_bytes -= size
            self._wake()
            raise

    def give_back(self, size: int) -> None:
        """What `take` gave is free again."""
        self._used_bytes -= size
        self._wake()

    def _fits(self, size: int) -> bool:
        return not self._used_bytes or self._used_bytes + size <= self._capacity_bytes

    def _wake(self) -> None:
        while self._waiting:
            size, turn = self._waiting[0]
            # One that has left holds nothing, and holds nobody up.
            if not turn.done():
                if not self._fits(size):
                    return
                self._used_bytes += size
                turn.set_result(None)
            self._waiting.popleft()


class Pacer:
    """A token bucket that holds back senders together; one that has nothing to hold back costs nothing."""

    BURST_S = 0.01
    """Of unused time that may be made up for; longer than a timer is late."""
    CHUNK_S = 0.01
    """Each chunk wakes a thread; a small patch of another transfer waits for one."""
    CHUNK_BYTES_MIN, CHUNK_BYTES_MAX = 4096, MIB

    def __init__(self, bytes_per_s: float | None) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at_s = -float("inf")
        self._reserve: Callable[[int], float] | None = None

    def reserve_with(self, reserve: Callable[[int], float]) -> None:
        """Have others keep the books, which count with senders that don't come by here: `reserve` books bytes and says
        in how many seconds they may leave."""
        self._reserve = reserve

    @property
    def chunk_bytes(self) -> int | None:
        """How much to take at once, so that a small patch soon gets its turn; None without a rate."""
        if self.bytes_per_s is None:
            return None
        return int(min(max(self.bytes_per_s * self.CHUNK_S, self.CHUNK_BYTES_MIN), self.CHUNK_BYTES_MAX))

    async def take(self, size: int) -> None:
        """Returns when `size` more bytes may have left, in the order of the calls."""
        if self.bytes_per_s is None:
            return
        if self._reserve is not None:
            await asyncio.sleep(self._reserve(size))
            return
        now_s = asyncio.get_running_loop().time()
        self._free_at_s = max(self._free_at_s, now_s - self.BURST_S) + size / self.bytes_per_s
        if self._free_at_s > now_s:
            await asyncio.sleep(self._free_at_s - now_s)
