"""From the engine's steps to the frontends: what each gave is kept in its record and sent, one message a frontend."""

import asyncio
import contextvars
import logging
from collections.abc import Sequence

from meshift.backends.base import TokenEvent
from meshift.schemas import subjects
from meshift.schemas.errors import OverloadError
from meshift.schemas.identity import Owner
from meshift.schemas.logprobs import Logprobs
from meshift.services.bus.base import Bus
from meshift.services.worker.batches import BatchBuilder
from meshift.services.worker.counters import WorkerCounters
from meshift.services.worker.requests import RequestRecord, RequestTable

logger = logging.getLogger(__name__)


class Streams:
    """Of one worker."""

    def __init__(
        self, owner: Owner, bus: Bus, requests: RequestTable, counters: WorkerCounters, resend_s: float
    ) -> None:
        self._owner = owner
        self._bus = bus
        self._requests = requests
        self._counters = counters
        self._resend_s = resend_s

    def on_step(self, events: Sequence[TokenEvent]) -> None:
        """One step's events."""
        # An engine's timers may have been set while some request's context was the current one. A step belongs to
        # no request: what is sent of it carries no trace.
        contextvars.Context().run(self._on_step, events)

    def resend(self, now_s: float) -> None:
        """Once per report interval: finishes that wait for their acknowledgement too long."""
        unacknowledged = self._requests.unacknowledged()
        if not unacknowledged:
            return
        builders: dict[str, BatchBuilder] = {}
        for record in unacknowledged:
            if now_s - record.sent_s >= self._resend_s:
                record.sent_s = now_s
                self._counters.resent += 1
                builder = builders.setdefault(record.frontend.frontend_id, BatchBuilder())
                builder.add(record, record.end, ())
        self._publish(builders, now_s)

    def announce(self, record: RequestRecord) -> None:
        """A row without tokens: its frontend learns who has it, and asks for what it misses."""
        builder = BatchBuilder()
        builder.add(record, record.end, ())
        self._publish({record.frontend.frontend_id: builder}, asyncio.get_running_loop().time())

    def _on_step(self, events: Sequence[TokenEvent]) -> None:
        builders: dict[str, BatchBuilder] = {}
        now_s = asyncio.get_running_loop().time()
        for event in events:
            record = self._requests.get(event.key)
            if record is not None and self._take(record, event, now_s):
                builder = builders.get(record.frontend.frontend_id)
                if builder is None:
                    builder = builders[record.frontend.frontend_id] = BatchBuilder()
                builder.add(record, event.start, event.tokens)
        self._publish(builders, now_s)

    def _take(self, record: RequestRecord, event: TokenEvent, now_s: float) -> bool:
        """Keep an event's tokens. Returns whether they are to be sent."""
        if event.start != record.end:
            raise AssertionError(f"{event.key}: engine gave tokens from {event.start}, expected {record.end}")
        record.output.extend(event.tokens)
        if record.logprobs is not None:
            self._take_logprobs(record, record.logprobs, event)
        record.finish = event.finish
        record.sent_s = now_s
        if event.finish is not None:
            self._counters.finished(event.finish)
        if record.trace is not None:
            record.trace.on_event(event)
        if record.muted and record.finish is not None:
            self._requests.engine_ended(record)
        return not record.muted

    @staticmethod
    def _take_logprobs(record: RequestRecord, known: Logprobs, event: TokenEvent) -> None:
        known.extend(event.logprobs or ())
        if len(known) != len(record.output):
            raise AssertionError(f"{event.key}: {len(known)} log-probabilities of {len(record.output)} tokens")

    def _publish(self, builders: dict[str, BatchBuilder], now_s: float) -> None:
        emitted_ns = round(now_s * 1e9)
        for frontend_id, builder in builders.items():
            batch = builder.build(self._owner, emitted_ns)
            try:
                self._bus.publish(subjects.frontend_tokens(frontend_id), batch)
            except OverloadError as error:
                self._counters.batches_lost += 1
                # The outputs stay here: the frontend asks for them when it misses them.
                logger.warning("tokens for %s not sent: %s", frontend_id, error)
