"""NixlTransport passes the transport suite, on CPU memory; skipped where NIXL isn't installed."""

from collections.abc import AsyncIterator, Callable

import pytest

pytest.importorskip("nixl", reason="NIXL isn't installed: pip install nixl")

from meshift.kv_memory.transport.base import Transport
from meshift.kv_memory.transport.nixl import NixlTransport
from tests.contract.transport_suite import Ends, TransportSuite


class TestNixlTransport(TransportSuite):
    @pytest.fixture
    async def ends(self) -> AsyncIterator[Ends]:
        sender, receiver = NixlTransport(), NixlTransport(rank=1)
        await sender.start()
        await receiver.start()
        yield sender, receiver
        await sender.close()
        await receiver.close()

    @pytest.fixture
    def fresh_end(self) -> Callable[[], Transport]:
        return lambda: NixlTransport(rank=2)
