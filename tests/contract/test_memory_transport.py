"""MemoryTransport passes the transport suite, on a stock loop."""

from collections.abc import AsyncIterator, Callable
from itertools import count

import pytest

from meshift.kv_memory.transport import Link, MemoryFabric, MemoryTransport, Transport
from tests.contract.transport_suite import Ends, TransportSuite


class TestMemoryTransport(TransportSuite):
    @pytest.fixture(params=["instant", "slow"])
    def fabric(self, request: pytest.FixtureRequest) -> MemoryFabric:
        slow = Link(bandwidth_bytes_per_s=4e9, latency_s=1e-4)
        return MemoryFabric(link=slow if request.param == "slow" else Link())

    @pytest.fixture
    async def ends(self, fabric: MemoryFabric) -> AsyncIterator[Ends]:
        sender, receiver = MemoryTransport(fabric, "source"), MemoryTransport(fabric, "destination")
        await sender.start()
        await receiver.start()
        yield sender, receiver
        await sender.close()
        await receiver.close()

    @pytest.fixture
    def fresh_end(self, fabric: MemoryFabric) -> Callable[[], Transport]:
        ranks = count()
        return lambda: MemoryTransport(fabric, "third", next(ranks))
