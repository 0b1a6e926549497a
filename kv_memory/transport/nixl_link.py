"""What both ends of `NixlTransport` share: the agent, the peers that it knows, and when it is polled."""

import asyncio
import base64
import binascii
import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence

from meshift.kv_memory.staging import StagingPool
from meshift.kv_memory.transport.base import TransportError
from meshift.kv_memory.transport.nixl_agent import Agent, Read

METADATA_BYTES_MAX = 1 << 16
PEERS_MAX = 1024
"""That the agent knows; the one unused for longest is forgotten."""

PAUSE_MIN_S, PAUSE_MAX_S, PAUSE_IDLE_S = 0.0001, 0.001, 0.02
"""Between two polls: soon after something happened, later, and while nothing is expected."""

POLLS_LAST = 10
"""At the end, so that last answers leave."""

MakeAgent = Callable[[str, Sequence[StagingPool]], Agent]

_log = logging.getLogger(__name__)


class NixlLink:
    """One agent. It is polled on the loop that ran `start`."""

    def __init__(
        self, make_agent: MakeAgent, *, on_message: Callable[[bytes], None], expecting: Callable[[], bool]
    ) -> None:
        """`expecting` tells whether messages are expected, `on_message` gets them."""
        self._make_agent = make_agent
        self._on_message = on_message
        self._expecting = expecting
        self._agent: Agent | None = None
        self._peers: OrderedDict[bytes, str] = OrderedDict()
        self._reads: dict[Read, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._active_at_s = 0.0

    @property
    def metadata(self) -> bytes:
        """What a peer must know of this end. Raises TransportError if not running."""
        return self._running().metadata

    def start(self, pools: Sequence[StagingPool]) -> None:
        """Make the agent, and register the pools. Raises TransportError."""
        self._agent = self._make_agent(f"meshift-{uuid.uuid4().hex}", pools)
        self.hurry()

    def close(self) -> None:
        """What runs fails; no peer reads or writes here any more."""
        agent = self._agent
        if agent is None:
            return
        for _ in range(POLLS_LAST):
            self._poll(agent)
        self._agent = None
        if self._timer is not None:
            self._timer.cancel()
        for read, settled in self._reads.items():
            read.release()
            fail(settled, "closed")
        self._reads.clear()
        agent.close()

    def notify(self, peer: bytes, message: bytes) -> None:
        """Put a message on the way to the peer of that metadata. Raises TransportError, not always if it is
        dead."""
        agent = self._running()
        agent.notify(self._peer(agent, peer), message)
        self.hurry()

    async def read(self, peer: bytes, peer_address: int, address: int, size: int) -> None:
        """Fetch at least one byte from the peer's memory. Returns, or raises TransportError, when nothing is
        written here any more; that may be never, and cancelling it leaves the read under way."""
        agent = self._running()
        read = agent.read(self._peer(agent, peer), peer_address, address, size)
        settled = self._reads[read] = asyncio.get_running_loop().create_future()
        self.hurry()
        await settled

    def hurry(self) -> None:
        """Something is about to happen: poll soon."""
        self._active_at_s = asyncio.get_running_loop().time()
        self._poll_in(0)

    # ---- polling ----

    def _poll_in(self, pause_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._tick)

    def _tick(self) -> None:
        if self._agent is None:
            return
        loop = asyncio.get_running_loop()
        try:
            if self._poll(self._agent):
                self._active_at_s = loop.time()
        finally:
            self._poll_in(self._pause_s(loop.time() - self._active_at_s))

    def _pause_s(self, quiet_s: float) -> float:
        if not self._reads and not self._expecting():
            return PAUSE_IDLE_S
        return min(max(quiet_s / 4, PAUSE_MIN_S), PAUSE_MAX_S) if quiet_s > PAUSE_MIN_S else 0.0

    def _poll(self, agent: Agent) -> bool:
        """Move everything on; whether anything happened."""
        try:
            messages = agent.messages()
        except TransportError as error:
            _log.warning("can't poll: %s", error)
            messages = []
        for message in messages:
            self._on_message(message)
        return self._check_reads() or bool(messages)

    def _check_reads(self) -> bool:
        ended = []
        for read, settled in self._reads.items():
            try:
                if not read.settled():
                    continue
                if not settled.done():
                    settled.set_result(None)
            except TransportError as error:
                fail(settled, str(error))
            ended.append(read)
        for read in ended:
            del self._reads[read]
        return bool(ended)

    # ---- peers ----

    def _peer(self, agent: Agent, metadata: bytes) -> str:
        if metadata not in self._peers:
            if len(self._peers) >= PEERS_MAX:
                agent.remove_peer(self._peers.popitem(last=False)[1])
            self._peers[metadata] = agent.add_peer(metadata)
        self._peers.move_to_end(metadata)
        return self._peers[metadata]

    def _running(self) -> Agent:
        if self._agent is None:
            raise TransportError("not running")
        return self._agent


def location_of(metadata: bytes) -> str:
    """As an address tells it."""
    return base64.b64encode(metadata).decode()


def metadata_of(location: str) -> bytes:
    """What `location_of` was made of. Raises TransportError."""
    try:
        metadata = base64.b64decode(location, validate=True)
    except (binascii.Error, ValueError):
        metadata = b""
    if not 0 < len(metadata) < METADATA_BYTES_MAX:
        raise TransportError("the address isn't one of NIXL's")
    return metadata


def fail(future: "asyncio.Future[None]", reason: str) -> None:
    """With a TransportError, unless it is done. Nobody need wait for it."""
    if not future.done():
        future.set_exception(TransportError(reason))
        future.exception()
