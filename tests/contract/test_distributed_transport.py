"""DistributedTransport passes the transport suite, over Gloo on loopback, both ends in one process."""

from collections.abc import AsyncIterator, Callable

import pytest

from meshift.kv_memory.transport.base import Transport
from meshift.kv_memory.transport.distributed import DistributedTransport, HandshakeLimits
from tests.contract.transport_suite import Ends, TransportSuite


class TestDistributedTransport(TransportSuite):
    @pytest.fixture
    async def ends(self) -> AsyncIterator[Ends]:
        handshake = HandshakeLimits(crossing_timeout_s=5.0)
        sender, receiver = DistributedTransport(handshake=handshake), DistributedTransport(rank=1, handshake=handshake)
        await sender.start()
        await receiver.start()
        yield sender, receiver
        await sender.close()
        await receiver.close()

    @pytest.fixture
    def fresh_end(self) -> Callable[[], Transport]:
        return lambda: DistributedTransport(rank=2)
