"""Bytes of moves beside the steps: a thread with a transport, which sends what the step thread has gathered and
writes what arrives into reserved slots."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from meshift.backends.sglang import wire_moves as wire
from meshift.backends.sglang.plugin.context import Outbox
from meshift.kv_memory.transport.base import Address, Patch, PatchHandler, TransportError
from meshift.kv_memory.transport.tcp import TcpTransport

START_TIMEOUT_S = 10.0


class Round:
    """What one command sends, patch by patch, to any number of pairs. Made and filled by the step thread."""

    def __init__(self, nonce: int, timeout_s: float) -> None:
        self.nonce = nonce
        self.timeout_s = timeout_s
        self.byte_count = 0
        self.applied_bytes = 0
        self.gathered_ns = 0
        """When the last patch was handed over."""
        self.sends: list[asyncio.Task[None]] = []
        """The data thread's."""

    @property
    def pending_bytes(self) -> int:
        """Gathered and not yet applied."""
        return self.byte_count - self.applied_bytes


class DataPlane:
    """One per rank. Methods are the step thread's; handlers of transfers run on the data thread."""

    def __init__(self, rank: int, host: str, make_outbox: Callable[[], Outbox]) -> None:
        self._rank = rank
        self._make_outbox = make_outbox
        self._outbox: Outbox | None = None
        self._transport = TcpTransport(host, rank=rank)
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="meshift-data", daemon=True)

    def start(self) -> None:
        """Listen. Raises TransportError."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._transport.start(), self._loop).result(START_TIMEOUT_S)

    def open_transfer(self, transfer_id: str, handler: PatchHandler) -> Address:
        """As `Transport.open_transfer`."""
        return self._transport.open_transfer(transfer_id, handler)

    def close_transfer(self, transfer_id: str) -> None:
        """As `Transport.close_transfer`; a patch may still be being written."""
        self._transport.close_transfer(transfer_id)

    def send(self, round_: Round, address: Address, patch: Patch) -> None:
        """Have a patch sent, after those of its transfer that were handed over before."""
        round_.byte_count += memoryview(patch.payload).nbytes
        self._loop.call_soon_threadsafe(self._send, round_, address, patch)

    def finish(self, round_: Round) -> None:
        """Nothing more comes for this round: `Sent` is reported when all of it is applied."""
        round_.gathered_ns = time.monotonic_ns()
        self._loop.call_soon_threadsafe(self._keep, self._finish(round_))

    def report_when_quiet(self, nonce: int) -> None:
        """`Quiet`, when no patch of a transfer that is closed now is being written."""
        # Patches are written by one call of the loop each.
        self._loop.call_soon_threadsafe(self.report, wire.Quiet(rank=self._rank, nonce=nonce))

    def report(self, report: wire.Sent | wire.Quiet | wire.Applied) -> None:
        """The data thread's: tell the worker."""
        if self._outbox is None:
            self._outbox = self._make_outbox()
        self._outbox.send(report)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _keep(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _send(self, round_: Round, address: Address, patch: Patch) -> None:
        round_.sends.append(self._keep(self._apply(round_, address, patch)))

    async def _apply(self, round_: Round, address: Address, patch: Patch) -> None:
        await self._transport.send(address, patch, timeout_s=round_.timeout_s)
        round_.applied_bytes += memoryview(patch.payload).nbytes

    async def _finish(self, round_: Round) -> None:
        results = await asyncio.gather(*round_.sends, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        unforeseen = [error for error in errors if not isinstance(error, TransportError)]
        self.report(
            wire.Sent(
                rank=self._rank,
                nonce=round_.nonce,
                error=str((unforeseen or errors)[0]) or "failed" if errors else "",
                transfer_ns=time.monotonic_ns() - round_.gathered_ns,
            )
        )
