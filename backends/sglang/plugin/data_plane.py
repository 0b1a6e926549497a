"""Bytes of moves beside the steps: what is gathered goes to the data thread, and what that knows goes to the worker."""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from meshift.backends.sglang import wire_moves as wire
from meshift.backends.sglang.plugin.context import Outbox
from meshift.kernels.cpu.library import is_available
from meshift.kv_memory.data_thread import DataThread, OnDone, OnQuiet
from meshift.kv_memory.staging import StagingPool
from meshift.kv_memory.transport import NIXL_LIMITS, TransportLimits, create_transport
from meshift.kv_memory.transport.base import Address, DataTransport, Patch, PatchHandler, TransportError

START_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 5.0
STAGING_BYTES = 128 << 20
"""Gathered and not yet applied elsewhere, of all moves together. The system gives the memory when it is used."""


class Round:
    """What one command sends, patch by patch, to any number of pairs."""

    def __init__(self, nonce: int, timeout_s: float) -> None:
        self.nonce = nonce
        self.timeout_s = timeout_s
        self.byte_count = 0
        self.begun_ns = 0
        """When the first patch was begun."""
        self.gather_ns = 0
        """What copying out of the pool took."""
        self.pending = 1
        """Patches on their way, and one for those to come."""
        self.error = ""


class DataPlane:
    """One per rank. Methods are the step thread's; callbacks and handlers run on the data thread."""

    def __init__(
        self,
        rank: int,
        host: str,
        make_outbox: Callable[[], Outbox],
        transport: DataTransport = "tcp",
        bytes_per_s: float | None = None,
    ) -> None:
        self.staging = StagingPool(STAGING_BYTES)
        self._rank = rank
        self._make_outbox = make_outbox
        self._outbox: Outbox | None = None
        self._lock = threading.Lock()
        limits = replace(NIXL_LIMITS if transport == "nixl" else TransportLimits(), bytes_per_s=bytes_per_s)
        self._thread = DataThread(
            lambda: create_transport(
                transport, location=host, rank=rank, staging=self.staging, limits=limits, compiled=is_available()
            ),
            name="meshift-data",
        )

    def start(self) -> None:
        """Listen. Raises TransportError."""
        self._thread.start(timeout_s=START_TIMEOUT_S)

    def close(self) -> bool:
        """Send and receive nothing more; whether the data thread has ended."""
        return self._thread.close(timeout_s=CLOSE_TIMEOUT_S)

    def open_transfer(self, transfer_id: str, handler: PatchHandler) -> Address:
        """As `DataThread.open_transfer`."""
        return self._thread.open_transfer(transfer_id, handler)

    def close_transfer(self, transfer_id: str) -> None:
        """Receive nothing more for it; a patch may still be being written."""
        self._thread.quiesce(transfer_id, lambda: None)

    def report_when_quiet(self, nonce: int, transfer_ids: Iterable[str]) -> None:
        """`Quiet`, when no patch of these transfers is being written and none will be."""
        quiet = wire.Quiet(rank=self._rank, nonce=nonce)
        left = list(transfer_ids)
        if not left:
            # By the same way as the others: the outbox is the data thread's.
            left = [""]
        count = len(left)

        def note() -> None:
            nonlocal count
            count -= 1
            if not count:
                self.report(quiet)

        for transfer_id in left:
            self._thread.quiesce(transfer_id, note)

    def post(self, address: Address, patch: Patch, timeout_s: float, on_done: OnDone) -> None:
        """As `DataThread.post`; what it would raise goes to `on_done`. Any thread."""
        try:
            self._thread.post(address, patch, timeout_s, on_done)
        except TransportError as error:
            on_done(error)

    def quiesce(self, transfer_id: str, on_quiet: OnQuiet) -> None:
        """As `DataThread.quiesce`."""
        self._thread.quiesce(transfer_id, on_quiet)

    def send(self, round_: Round, address: Address, patch: Patch, release: Callable[[], None]) -> None:
        """Have a patch sent, after those of its transfer that were handed over before; its payload must stay as it is
        until `release` is called."""
        with self._lock:
            round_.pending += 1

        def done(error: TransportError | None) -> None:
            self._note_done(round_, "" if error is None else str(error) or type(error).__name__)
            release()

        try:
            self._thread.post(address, patch, round_.timeout_s, done)
        except TransportError as error:
            done(error)

    def finish(self, round_: Round) -> None:
        """Nothing more comes for this round: `Sent` is reported when all of it is applied."""
        # Reports of rounds are the data thread's: let it come by there.
        self.run(lambda: self._note_done(round_, ""))

    def run(self, action: Callable[[], None]) -> None:
        """Have the data thread do something short, after what it was given before."""
        self._thread.quiesce("", action)

    def report(self, report: wire.Sent | wire.Quiet | wire.Applied) -> None:
        """The data thread's: tell the worker."""
        if self._outbox is None:
            self._outbox = self._make_outbox()
        self._outbox.send(report)

    def _note_done(self, round_: Round, error: str) -> None:
        with self._lock:
            round_.pending -= 1
            round_.error = round_.error or error
            complete = not round_.pending
        if complete:
            self.report(
                wire.Sent(
                    rank=self._rank,
                    nonce=round_.nonce,
                    error=round_.error,
                    gather_ns=round_.gather_ns,
                    transfer_ns=time.monotonic_ns() - round_.begun_ns,
                )
            )
