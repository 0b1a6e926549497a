"""One reconfiguration: carries out what `table` says, by orders to the instance's worker."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from meshift.schemas.errors import CallerError, MeshError, PeerGone, Stale
from meshift.schemas.identity import Owner
from meshift.schemas.layouts import LayoutRefusal, split_of
from meshift.schemas.reconfiguring import (
    LayoutOrder,
    LayoutOrders,
    LayoutReply,
    LayoutStep,
    ReconfigureBody,
    ReconfigureReport,
    WorkerPhase,
)
from meshift.services.coordinator.context import Context
from meshift.services.coordinator.convergence import is_close
from meshift.services.coordinator.planner import plan_change
from meshift.services.coordinator.record import Record
from meshift.services.coordinator.table import AT_WORKER, FINAL, GIVES_UP, TRANSITIONS, Event, State, next_state
from meshift.services.coordinator.traces import ReconfigureTrace

logger = logging.getLogger(__name__)

_S, _E = State, Event

DECLINES = frozenset({_S.PLANNING, _S.BEGINNING})
"""Where a refusal by the worker ends it: nothing has begun."""


class Reconfiguration:
    """From its order, or, of one that is adopted (without a `body`), from the first look, to its end."""

    def __init__(self, context: Context, owner: Owner, change_id: str, body: ReconfigureBody | None) -> None:
        self._context = context
        self._owner = owner
        self._body = body
        self.state = _S.PLANNING if body is not None else _S.ADOPTING
        now_s = context.now_s()
        self._record = Record(owner, change_id, now_s, entered_s=now_s)
        self._orders: LayoutOrders | None = None
        self._deadline_s = None if body is None else now_s + body.deadline_s
        self._silent_since_s: float | None = None
        self._silences = 0
        self._given_up: tuple[LayoutRefusal, str] | None = None
        self._trace = ReconfigureTrace.begin(context.tracer, owner, change_id, adopted=body is None)
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set when it is under way at its worker, or has ended."""
        self._effects: dict[State, Callable[[], Awaitable[Event]]] = {
            _S.PLANNING: self._plan,
            _S.BEGINNING: self._begin,
            _S.ADOPTING: self._adopt,
            _S.RESIZING: self._resize,
            _S.LOADING: self._load,
            _S.CONVERGING: self._converge,
            _S.COMMITTING: self._commit,
            _S.ABORTING: self._abort,
        }

    @property
    def change_id(self) -> str:
        return self._record.change_id

    async def run(self) -> ReconfigureReport:
        """Until it has ended. Raises nothing but what is cancelled."""
        try:
            while self.state not in FINAL:
                self._enter(next_state(self.state, await self._next_event()))
        finally:
            self._record.end_s = self._context.now_s()
            if not self.begun.done():
                self.begun.set_result(None)
            report = self.report()
            self._trace.end(report)
        self._context.counters.settled(report)
        return report

    def cancel(self, reason: str) -> None:
        """Undo it, if it isn't too late."""
        self._given_up = (LayoutRefusal.CANCELLED, reason)

    def report(self) -> ReconfigureReport:
        """As of now."""
        return self._record.report(self.state, self._context.now_s())

    def _enter(self, state: State) -> None:
        if state is self.state:
            return
        self._record.leave(self.state, self._context.now_s())
        self.state = state
        self._trace.enter(state)
        if state not in (_S.PLANNING, _S.BEGINNING) and not self.begun.done():
            self.begun.set_result(None)

    async def _next_event(self) -> Event:
        interruption = self._interruption()
        if interruption is not None:
            return interruption
        try:
            with self._trace.current():
                event = await self._effects[self.state]()
        except MeshError as error:
            return await self._unanswered(error)
        except Exception as error:
            logger.exception("%s: a bug while %s", self.change_id, self.state)
            self._record.note(LayoutRefusal.BROKEN, f"{type(error).__name__}: {error}")
            return await self._silent()
        self._silent_since_s, self._silences = None, 0
        if (self.state, event) in TRANSITIONS:
            return event
        return _E.ABORTING if self.state is _S.ABORTING else _E.ELSEWHERE

    def _interruption(self) -> Event | None:
        if self._context.report_of(self._owner) is None:
            self._record.note(LayoutRefusal.UNREACHABLE, f"{self._owner} is gone")
            return _E.GONE
        if (
            self._deadline_s is not None
            and self._context.now_s() >= self._deadline_s
            and self.state is not _S.COMMITTING
        ):
            self._given_up = self._given_up or (LayoutRefusal.DEADLINE, f"its deadline came while {self.state}")
        if self._given_up is not None and self.state in GIVES_UP:
            self._record.note(*self._given_up)
            return _E.GIVE_UP
        return None

    async def _unanswered(self, error: MeshError) -> Event:
        """Who refuses, declines; who isn't there any more, is gone; who doesn't answer is asked again."""
        if isinstance(error, Stale | PeerGone):
            self._record.note(LayoutRefusal.UNREACHABLE, str(error))
            return _E.GONE if isinstance(error, Stale) else await self._silent()
        if isinstance(error, CallerError) and self.state in DECLINES:
            self._record.note(LayoutRefusal.UNSUPPORTED, str(error))
            return _E.DECLINED
        logger.debug("%s, %s: %s", self.change_id, self.state, error)
        return await self._silent()

    async def _silent(self) -> Event:
        now_s, options = self._context.now_s(), self._context.options
        self._silences += 1
        self._silent_since_s = self._silent_since_s or now_s
        if self.state is _S.PLANNING and self._silences >= options.plan_tries_max:
            self._record.note(LayoutRefusal.UNREACHABLE, f"{self._owner} doesn't answer")
            return _E.DECLINED
        if now_s - self._silent_since_s > options.undecided_s:
            self._record.note(LayoutRefusal.UNREACHABLE, f"{self._owner} doesn't say what became of it")
            return _E.GONE
        await asyncio.sleep(options.retry_s)
        return _E.SILENT

    # ---- phases

    async def _plan(self) -> Event:
        body = self._body
        assert body is not None
        reply = await self._context.ask(self._owner, None)
        self._take(reply)
        plan = self._record.plan = plan_change(reply.facts, split_of(body.layers), body.flags)
        if plan.refusal is not None:
            self._record.note(plan.refusal, plan.reason)
            return _E.DRY if body.dry_run else _E.INFEASIBLE
        if body.dry_run:
            return _E.DRY
        if reply.change is not None and reply.change.change_id != self.change_id:
            self._record.note(LayoutRefusal.BUSY, f"{reply.change.change_id} is under way")
            return _E.DECLINED
        assert self._deadline_s is not None
        self._orders = LayoutOrders(
            target=plan.target,
            epoch=plan.epoch,
            flags=body.flags,
            commit=body.commit,
            capacity_during=plan.capacity_during,
            capacity_after=plan.capacity_after,
            tau_tokens=body.tau_tokens,
            bytes_per_s=body.bytes_per_s,
            deadline_s=max(0.001, self._deadline_s - self._context.now_s()),
        )
        return _E.FEASIBLE

    async def _begin(self) -> Event:
        reply = await self._order(LayoutStep.BEGIN, self._orders)
        if reply.refusal is not None:
            self._record.note(reply.refusal, reply.reason)
            return _E.DECLINED
        return self._where(reply)

    async def _adopt(self) -> Event:
        return self._where(await self._context.ask(self._owner, self.change_id))

    async def _resize(self) -> Event:
        return self._where(await self._order(LayoutStep.RESIZE))

    async def _load(self) -> Event:
        return self._where(await self._order(LayoutStep.COPY))

    async def _converge(self) -> Event:
        await asyncio.sleep(self._context.options.convergence_poll_s)
        event = self._where(await self._context.ask(self._owner, self.change_id))
        change = self._record.change
        if change is not None and change.phase is WorkerPhase.COPYING and change.stages:
            lag = change.lag_tokens
            self._record.look(self._context.now_s(), lag)
            self._trace.look(change, lag)
        return event

    async def _commit(self) -> Event:
        event = self._where(await self._order(LayoutStep.COMMIT))
        if event in (_E.BEHIND, _E.CLOSE):
            # It can't be just now: requests move, or the engine is busy.
            await asyncio.sleep(self._context.options.retry_s)
        return event

    async def _abort(self) -> Event:
        refusal, reason = self._given_up or (LayoutRefusal.CANCELLED, "it was to end")
        return self._where(await self._order(LayoutStep.ABORT, refusal=refusal, reason=reason))

    # ---- pieces

    async def _order(
        self,
        step: LayoutStep,
        orders: LayoutOrders | None = None,
        *,
        refusal: LayoutRefusal | None = None,
        reason: str = "",
    ) -> LayoutReply:
        return await self._context.order(
            LayoutOrder(
                owner=self._owner,
                change_id=self.change_id,
                step=step,
                orders=orders,
                refusal=refusal,
                reason=reason,
            )
        )

    def _where(self, reply: LayoutReply) -> Event:
        """What the worker's answer says of the change."""
        self._take(reply)
        change = reply.change
        if change is None or change.change_id != self.change_id:
            if self.state is not _S.ABORTING:
                self._record.note(LayoutRefusal.UNKNOWN, reply.reason or f"{self._owner} knows no such change")
            return _E.NOTHING
        self._record.change = change
        if self._deadline_s is None:
            self._deadline_s = self._context.now_s() + change.left_s
        event = AT_WORKER[change.phase]
        if event in (_E.ABORTING, _E.ABORTED) or change.refusal is not None:
            self._record.note(change.refusal, change.reason)
        if event is _E.COMMITTED:
            self._record.note(None, "")
        report = self._context.report_of(self._owner)
        running = 0 if report is None else report.running
        return _E.CLOSE if event is _E.BEHIND and is_close(change, running) else event

    def _take(self, reply: LayoutReply) -> None:
        self._record.epoch = reply.facts.epoch
