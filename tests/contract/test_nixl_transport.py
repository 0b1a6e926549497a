"""NixlTransport passes the transport suite, on CPU memory: over NIXL where it is installed, over a network in
its place everywhere."""

from collections.abc import AsyncIterator, Callable

import pytest

from meshift.kv_memory.transport.base import Transport
from meshift.kv_memory.transport.nixl import NixlTransport
from tests.contract.transport_suite import Ends, TransportSuite
from tests.unit.kv_memory.fake_nixl import FakeNixl

Make = Callable[[int], NixlTransport]


class NixlSuite(TransportSuite):
    @pytest.fixture
    async def ends(self, make: Make) -> AsyncIterator[Ends]:
        sender, receiver = make(0), make(1)
        await sender.start()
        await receiver.start()
        yield sender, receiver
        await sender.close()
        await receiver.close()

    @pytest.fixture
    def fresh_end(self, make: Make) -> Callable[[], Transport]:
        return lambda: make(2)


class TestOverAFakeNetwork(NixlSuite):
    @pytest.fixture
    def make(self) -> Make:
        network = FakeNixl()
        return lambda rank: NixlTransport(rank, make_agent=network.make_agent)


class TestOverNixl(NixlSuite):
    @pytest.fixture
    def make(self) -> Make:
        pytest.importorskip("nixl", reason="NIXL isn't installed: pip install nixl")
        return NixlTransport
