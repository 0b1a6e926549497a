"""The worker's table of requests that the ranks hold, and its translations to and from the wire. No I/O."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from meshift.backends.base import ClassUsage, EngineLoad, EngineRequest, TokenEvent
from meshift.backends.sglang import wire
from meshift.schemas.base import pack_tokens, unpack_tokens
from meshift.schemas.errors import InvalidRequest
from meshift.schemas.identity import RequestKey
from meshift.schemas.logprobs import Logprobs, unpack_columns
from meshift.schemas.requests import Finish, FinishReason

ENDED_KEYS_MAX = 65_536
"""Keys of ended requests that a second submission is still recognised by."""


class ProtocolViolation(Exception):
    """A rank reported what can't be: a gap, a repetition, an unknown ticket. The engine can't be trusted."""


@dataclass(slots=True)
class _Entry:
    key: RequestKey
    next_index: int
    submitted_ns: int
    rid: str
    """SGLang's name of it; that of its first key here."""
    first_index: int
    prompt: int
    execution: int
    moved: bool
    """It came by a move."""

    @property
    def runs(self) -> bool:
        """It came with its KV, or has given a token here. One that was preempted since counts too: nobody says so."""
        return self.moved or self.next_index > self.first_index


class RequestTable:
    """Tickets of live requests, the keys of late ones, and what was submitted but isn't in the ranks' load yet."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """`clock_ns` is the monotonic clock that worker and ranks have in common: they run on one host."""
        self._clock_ns = clock_ns
        self._ended: dict[RequestKey, None] = {}
        self._tickets: dict[RequestKey, int] = {}
        self._entries: dict[int, _Entry] = {}
        self._numbers = itertools.count(1)
        self._submits = 0
        self._unseen: deque[tuple[int, int]] = deque()
        """(ordinal of the submit, its demand), oldest first."""

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._tickets

    def __len__(self) -> int:
        return len(self._tickets)

    def open(self, request: EngineRequest, seed: int, *, moved: bool = False) -> wire.Submit:
        """Enter a request; its command. One that has `moved` here is in the ranks' load from the first. Raises
        InvalidRequest if its key is or was in the table."""
        if self.has_seen(request.key):
            raise InvalidRequest(f"{request.key} was submitted before", param="request_id")
        ticket = next(self._numbers)
        self._tickets[request.key] = ticket
        rid = wire.encode_rid(request.key)
        self._entries[ticket] = _Entry(
            request.key,
            len(request.output),
            self._clock_ns(),
            rid,
            first_index=len(request.output),
            prompt=len(request.prompt),
            execution=request.priority.execution,
            moved=moved,
        )
        if not moved:
            self._submits += 1
            self._unseen.append((self._submits, len(request.prompt) + len(request.output)))
        return _submit_command(request, ticket, seed)

    def has_seen(self, key: RequestKey) -> bool:
        """Whether it is or was in the table."""
        return key in self._tickets or key in self._ended

    def rid(self, key: RequestKey) -> str | None:
        """SGLang's name of a live request."""
        ticket = self._tickets.get(key)
        return None if ticket is None else self._entries[ticket].rid

    def rename(self, old: RequestKey, new: RequestKey) -> None:
        """Events from now on are those of `new`. Nothing happens if `old` isn't there (any more)."""
        ticket = self._tickets.get(old)
        if ticket is not None and old != new:
            del self._tickets[old]
            self._ended[old] = None
            self._tickets[new] = ticket
            self._entries[ticket].key = new

    def forget(self, key: RequestKey, *, ended: bool = True) -> None:
        """It runs elsewhere: no event of it will come. If it never ran here (not `ended`), it may still come."""
        ticket = self._tickets.get(key)
        if ticket is not None:
            self._close(ticket, key)
            if not ended:
                del self._ended[key]

    def withdraw(self, key: RequestKey) -> None:
        """Forget a request just opened, whose command couldn't be sent."""
        del self._entries[self._tickets.pop(key)]
        self._unseen.pop()
        self._submits -= 1

    def take_step(self, report: wire.StepReport) -> list[TokenEvent]:
        """A step's events, in the report's order. Raises ProtocolViolation."""
        return list(self._events(report))

    def _events(self, report: wire.StepReport) -> Iterator[TokenEvent]:
        tokens = unpack_tokens(report.tokens)
        finishes = {row.row: row for row in report.finishes}
        logprobs = _logprobs_by_row(report) if report.logprobs is not None else {}
        offset = 0
        for row, (ticket, start, count) in enumerate(zip(report.tickets, report.starts, report.counts, strict=True)):
            entry = self._entries.get(ticket)
            if entry is None or start != entry.next_index:
                raise ProtocolViolation(f"ticket {ticket}: tokens from {start}, expected {entry}")
            entry.next_index += count
            finish = finishes.get(row)
            begun_ns = report.prefill_starts_ns.get(row)
            if finish is not None:
                self._close(ticket, entry.key)
            yield TokenEvent(
                key=entry.key,
                start=start,
                tokens=tokens[offset : offset + count],
                finish=None if finish is None else _finish(finish),
                logprobs=logprobs.get(row),
                queued_ns=None if begun_ns is None else max(0, begun_ns - entry.submitted_ns),
            )
            offset += count

    def _close(self, ticket: int, key: RequestKey) -> None:
        del self._entries[ticket], self._tickets[key]
        self._ended[key] = None
        if len(self._ended) > ENDED_KEYS_MAX:
            del self._ended[next(iter(self._ended))]

    def load(self, snapshot: wire.LoadSnapshot) -> EngineLoad:
        """The ranks' load with the submits that they hadn't seen counted as waiting."""
        while self._unseen and self._unseen[0][0] <= snapshot.submits_seen:
            self._unseen.popleft()
        unseen_demand = sum(demand for _, demand in self._unseen)
        first_unseen = self._unseen[0][1] if self._unseen else 0
        return EngineLoad(
            capacity=snapshot.capacity,
            used=snapshot.used,
            cached=snapshot.cached,
            free=snapshot.free,
            reserved=snapshot.reserved,
            running=snapshot.running,
            waiting=snapshot.waiting + len(self._unseen),
            head_demand=snapshot.head_demand if snapshot.waiting else first_unseen,
            queued_demand=snapshot.queued_demand + unseen_demand,
            step_count=snapshot.step_count,
            usages=self._usages(snapshot),
            prefill_tokens=snapshot.prefill_tokens,
            batch_full=snapshot.batch_full,
        )

    def held_tokens(self, key: RequestKey, snapshot: wire.LoadSnapshot) -> int | None:
        """Tokens with KV, 0 while it waits; None in its prefill, too far back in a queue to be told of, or if it isn't
        here."""
        ticket = self._tickets.get(key)
        if ticket is None:
            return None
        entry = self._entries[ticket]
        if entry.rid in snapshot.waiting_rids:
            return 0
        return entry.prompt + entry.next_index if entry.runs else None

    def _usages(self, snapshot: wire.LoadSnapshot) -> tuple[ClassUsage, ...]:
        """Of those that have given a token. Where all that are here have one priority, the ranks' own figures, which
        count those in their prefill too."""
        executions = {entry.execution for entry in self._entries.values()}
        if len(executions) == 1 and snapshot.running:
            return (ClassUsage(executions.pop(), snapshot.running, snapshot.used),)
        run = [entry for entry in self._entries.values() if entry.runs]
        requests = dict.fromkeys(sorted({entry.execution for entry in run}), 0)
        tokens = dict.fromkeys(requests, 0)
        for entry in run:
            requests[entry.execution] += 1
            tokens[entry.execution] += entry.prompt + entry.next_index
        return tuple(ClassUsage(execution, requests[execution], tokens[execution]) for execution in requests)


def _submit_command(request: EngineRequest, ticket: int, seed: int) -> wire.Submit:
    sampling = request.sampling
    fields = wire.SamplingFields(
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=sampling.min_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        logit_bias={str(token): bias for token, bias in sampling.logit_bias},
        ignore_eos=sampling.ignore_eos,
        seed=seed if sampling.seed is None else sampling.seed,
        logprobs=sampling.logprobs,
        json_schema=sampling.json_schema,
    )
    return wire.Submit(
        ticket=ticket,
        rid=wire.encode_rid(request.key),
        prompt=pack_tokens(request.prompt),
        output=pack_tokens(request.output),
        sampling=fields,
        priority=request.priority.scheduling,
    )


def _logprobs_by_row(report: wire.StepReport) -> dict[int, Logprobs]:
    columns = report.logprobs
    assert columns is not None
    counts = tuple(report.counts[row] for row in columns.rows)
    return unpack_columns(columns.rows, columns.tops, counts, columns.values, columns.top_tokens)


def _finish(row: wire.FinishRow) -> Finish:
    return Finish(
        reason=FinishReason(row.reason),
        matched_stop=row.matched_stop,
        message=row.message,
        param=row.param,
        cached_tokens=row.cached_tokens,
        preemptions=row.preemptions,
        preemption_loss_ns=row.preemption_loss_ns,
    )
