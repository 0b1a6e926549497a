"""A network of agents in one process, in the place of NIXL's: memory is really read by address, messages are
queues; peers freeze and die."""

import ctypes
from collections import deque
from collections.abc import Sequence

from meshift.kv_memory.staging import StagingPool
from meshift.kv_memory.transport.base import TransportError


class FakeNixl:
    """The network; `make_agent` is what a transport takes."""

    def __init__(self) -> None:
        self.agents: dict[str, FakeAgent] = {}
        self.frozen: set[str] = set()
        """Names of agents whose process doesn't run: nothing comes from their memory."""
        self.reads = 0
        self.unsettled = 0
        """Reads that could still write."""

    def make_agent(self, name: str, pools: Sequence[StagingPool]) -> "FakeAgent":
        agent = self.agents[name] = FakeAgent(self, name, pools)
        return agent


class FakeAgent:
    """An `Agent`. Its metadata is its name."""

    def __init__(self, network: FakeNixl, name: str, pools: Sequence[StagingPool]) -> None:
        self.name = name
        self.metadata = name.encode()
        self.polls = 0
        self.inbox: deque[bytes] = deque()
        self.peers: set[str] = set()
        self.pools = pools
        self._network = network

    def add_peer(self, metadata: bytes) -> str:
        self._alive(metadata.decode())
        self.peers.add(metadata.decode())
        return metadata.decode()

    def remove_peer(self, name: str) -> None:
        self.peers.discard(name)

    def notify(self, peer: str, message: bytes) -> None:
        assert peer in self.peers
        self._alive(peer).inbox.append(message)

    def messages(self) -> list[bytes]:
        self.polls += 1
        found = list(self.inbox)
        self.inbox.clear()
        return found

    def read(self, peer: str, peer_address: int, address: int, size: int) -> "FakeRead":
        assert peer in self.peers
        assert any(p.address <= address <= address + size <= p.address + p.capacity_bytes for p in self.pools)
        self._network.reads += 1
        return FakeRead(self._network, peer, peer_address, address, size)

    def close(self) -> None:
        self._network.agents.pop(self.name, None)

    def _alive(self, name: str) -> "FakeAgent":
        if name not in self._network.agents:
            raise TransportError(f"{name} is gone")
        return self._network.agents[name]


class FakeRead:
    """A `Read`, that takes two polls."""

    def __init__(self, network: FakeNixl, peer: str, peer_address: int, address: int, size: int) -> None:
        self._network, self._peer = network, peer
        self._copy = (address, peer_address, size)
        self._polls = 0
        network.unsettled += 1

    def settled(self) -> bool:
        self._polls += 1
        peer = self._network.agents.get(self._peer)
        if peer is None:
            self.release()
            raise TransportError(f"{self._peer} is gone")
        if self._peer in self._network.frozen or self._polls < 2:
            return False
        address, peer_address, size = self._copy
        pools = peer.pools
        if not any(p.address <= peer_address <= peer_address + size <= p.address + p.capacity_bytes for p in pools):
            self.release()
            raise TransportError("not registered")
        ctypes.memmove(address, peer_address, size)
        self.release()
        return True

    def release(self) -> None:
        self._network.unsettled -= 1
