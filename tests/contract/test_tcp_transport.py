"""TcpTransport passes the transport suite, over loopback."""

from collections.abc import AsyncIterator, Callable

import pytest

from meshift.kernels.cpu.library import is_available
from meshift.kv_memory.transport.base import Transport
from meshift.kv_memory.transport.limits import TransportLimits
from meshift.kv_memory.transport.tcp import TcpTransport
from tests.contract.transport_suite import Ends, TransportSuite

LIMITS = {
    "fast": TransportLimits(),
    "paced": TransportLimits(bytes_per_s=4e9),
    "narrow": TransportLimits(in_flight_bytes_max=100_000, connections_per_peer_max=1),
}
COMPILED = [False, pytest.param(True, marks=pytest.mark.skipif(not is_available(), reason="no C++ compiler"))]


class TestTcpTransport(TransportSuite):
    @pytest.fixture(params=list(LIMITS))
    def limits(self, request: pytest.FixtureRequest) -> TransportLimits:
        return LIMITS[request.param]

    @pytest.fixture(params=COMPILED, ids=["loop", "compiled"])
    def compiled(self, request: pytest.FixtureRequest) -> bool:
        return bool(request.param)

    @pytest.fixture
    async def ends(self, limits: TransportLimits, compiled: bool) -> AsyncIterator[Ends]:
        sender = TcpTransport(limits=limits, compiled=compiled)
        receiver = TcpTransport(rank=1, limits=limits, compiled=compiled)
        await sender.start()
        await receiver.start()
        yield sender, receiver
        await sender.close()
        await receiver.close()

    @pytest.fixture
    def fresh_end(self, limits: TransportLimits, compiled: bool) -> Callable[[], Transport]:
        return lambda: TcpTransport(rank=2, limits=limits, compiled=compiled)
