"""The one place that touches the package `nixl`: an agent on registered staging memory, with its errors as
TransportError.

The agent has no progress thread, which would spin on a core for as long as the process lives: whoever owns
it polls. Then no call waits for a peer; a call to a peer that is dead raises at some time or does nothing,
and one to a frozen peer looks as if it were under way for ever."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from meshift.kv_memory.staging import StagingPool
from meshift.kv_memory.transport.base import TransportError

_MEMORY = "DRAM"
_T = TypeVar("_T")


class Read(Protocol):
    """Bytes of a peer on their way into this process."""

    def settled(self) -> bool:
        """Whether all bytes are here. Raises TransportError if they never will be. After either, nothing is
        written any more."""

    def release(self) -> None:
        """Give it up."""


class Agent(Protocol):
    """One end of the network, on registered memory. Not thread-safe; TransportError is all it raises."""

    metadata: bytes
    """What a peer must know of it."""

    def add_peer(self, metadata: bytes) -> str:
        """Know a peer from its metadata; its name."""

    def remove_peer(self, name: str) -> None:
        """Forget it."""

    def notify(self, peer: str, message: bytes) -> None:
        """Put a message on the way; whether it arrives isn't known."""

    def messages(self) -> list[bytes]:
        """Those that arrived since. Nothing moves, in either direction, unless this is called often."""

    def read(self, peer: str, peer_address: int, address: int, size: int) -> Read:
        """Fetch `size` bytes, at least one, from the peer's registered memory into our own."""

    def close(self) -> None:
        """Nothing is read or written by peers any more."""


class NixlRead:
    """A `Read`."""

    def __init__(self, agent: Any, handle: Any) -> None:
        self._agent = agent
        self._handle = handle

    def settled(self) -> bool:
        """As `Read.settled`."""
        try:
            state = _checked(lambda: self._agent.check_xfer_state(self._handle))
            if state == "ERR":
                raise TransportError("reading from the peer failed")
        except TransportError:
            self.release()
            raise
        if state == "DONE":
            self.release()
            return True
        return False

    def release(self) -> None:
        """Give it up."""
        with suppress(TransportError):
            _checked(lambda: self._agent.release_xfer_handle(self._handle))


class NixlAgent:
    """An `Agent`."""

    def __init__(self, name: str, pools: Sequence[StagingPool]) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise TransportError(f"NIXL isn't there: {error}") from None
        configuration = nixl_agent_config(backends=["UCX"], enable_prog_thread=False)
        self._agent: Any = _checked(lambda: nixl_agent(name, configuration))
        regions = [(pool.address, pool.capacity_bytes, 0, "") for pool in pools]
        self._registered = _checked(lambda: self._agent.register_memory(regions, _MEMORY))
        self.metadata: bytes = _checked(self._agent.get_agent_metadata)
        """What a peer must know of this agent."""

    def add_peer(self, metadata: bytes) -> str:
        """Know a peer from its metadata; its name."""
        name = _checked(lambda: self._agent.add_remote_agent(metadata))
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_peer(self, name: str) -> None:
        """Forget it."""
        with suppress(TransportError):
            _checked(lambda: self._agent.remove_remote_agent(name))

    def notify(self, peer: str, message: bytes) -> None:
        """Put a message on the way; whether it arrives isn't known."""
        _checked(lambda: self._agent.send_notif(peer, message))

    def messages(self) -> list[bytes]:
        """Those that arrived since. Nothing moves, in either direction, unless this is called often."""
        found = _checked(self._agent.get_new_notifs)
        return [message for messages in found.values() for message in messages]

    def read(self, peer: str, peer_address: int, address: int, size: int) -> NixlRead:
        """As `Agent.read`."""
        here = _checked(lambda: self._agent.get_xfer_descs([(address, size, 0)], _MEMORY))
        there = _checked(lambda: self._agent.get_xfer_descs([(peer_address, size, 0)], _MEMORY))
        handle = _checked(lambda: self._agent.initialize_xfer("READ", here, there, peer, b""))
        read = NixlRead(self._agent, handle)
        try:
            _checked(lambda: self._agent.transfer(handle))
        except TransportError:
            read.release()
            raise
        return read

    def close(self) -> None:
        """Nothing is read or written by peers any more."""
        with suppress(TransportError):
            _checked(lambda: self._agent.deregister_memory(self._registered))
        self._agent = None


def _checked(call: Callable[[], _T]) -> _T:
    try:
        return call()
    except Exception as error:
        raise TransportError(f"NIXL: {str(error) or type(error).__name__}") from None
