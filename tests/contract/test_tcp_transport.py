"""TcpTransport passes the transport suite, over loopback."""

from collections.abc import AsyncIterator, Callable

import pytest

from meshift.kv_memory.transport.base import Transport
from meshift.kv_memory.transport.limits import TransportLimits
from meshift.kv_memory.transport.tcp import TcpTransport
from tests.contract.transport_suite import Ends, TransportSuite

LIMITS = {
    "fast": TransportLimits(),
    "paced": TransportLimits(bytes_per_s=4e9),
    "narrow": TransportLimits(in_flight_bytes_max=100_000, connections_per_peer_max=1),
}


class TestTcpTransport(TransportSuite):
    @pytest.fixture(params=list(LIMITS))
    def limits(self, request: pytest.FixtureRequest) -> TransportLimits:
        return LIMITS[request.param]

    @pytest.fixture
    async def ends(self, limits: TransportLimits) -> AsyncIterator[Ends]:
        sender, receiver = TcpTransport(limits=limits), TcpTransport(rank=1, limits=limits)
        await sender.start()
        await receiver.start()
        yield sender, receiver
        await sender.close()
        await receiver.close()

    @pytest.fixture
    def fresh_end(self, limits: TransportLimits) -> Callable[[], Transport]:
        return lambda: TcpTransport(rank=2, limits=limits)
