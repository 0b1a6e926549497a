"""The simulated engine's scheduler: what runs when, and which pages it holds.

Work is a prefill batch, or a segment of equal decode steps. Everything from outside takes effect at the next step
boundary, which for a segment of several steps means cutting it at the end of the step on its way. A boundary belongs
before an outside call of the same instant. So taking many steps at once changes no time and no token.
"""

import asyncio
from collections.abc import Callable, Iterable

from meshift.backends.base import MoveKey, TokenEvent
from meshift.backends.sim.batch import NEVER, DecodeBatch, Segment
from meshift.backends.sim.clock import Clock
from meshift.backends.sim.emission import Emission
from meshift.backends.sim.freezes import Freezes
from meshift.backends.sim.holds import Action, Holds
from meshift.backends.sim.lifecycle import RequestEvent, RequestState
from meshift.backends.sim.pages import PagePool
from meshift.backends.sim.parameters import SimParameters
from meshift.backends.sim.pipeline import Timing
from meshift.backends.sim.prefill import admit
from meshift.backends.sim.request import SimRequest
from meshift.backends.sim.table import RequestTable
from meshift.backends.sim.waiting import WaitingQueue
from meshift.backends.sim.work import Emit, Work


class EngineCore:
    """Raises nothing but AssertionError and ImpossibleTransition: its callers have checked."""

    def __init__(
        self,
        parameters: SimParameters,
        clock: Clock,
        deliver: Callable[[list[TokenEvent]], None],
        *,
        skip_steps: bool,
        emit: Emit,
    ) -> None:
        self.parameters = parameters
        self.requests = RequestTable()
        self.pool = PagePool(parameters.pages)
        self.queue = WaitingQueue(parameters)
        self.batch = DecodeBatch(parameters)
        self.work = Work.NOTHING
        self.timing = Timing(parameters, None, ())
        self._clock = clock
        self._emission = Emission(deliver)
        self._skip_steps = skip_steps
        self._emit_steps = emit == "step"
        self._copying = 0
        self._prefill: list[SimRequest] = []
        self._segment = Segment(0, 1, 0, 1)
        self._end_ns = NEVER
        self._timer: asyncio.Handle | None = None
        self._joins: dict[SimRequest, None] = {}
        self._cancels: list[SimRequest] = []
        self._freezes = Freezes(clock)
        self._holds = Holds()
        self._prefill_count = 0
        self.arrived = self.prefill_tokens = 0  # tokens whose KV came with a request, or by prefills

    # ---- from outside, at any time; each begins with `catch_up`

    def catch_up(self) -> None:
        """Let a boundary that is due at this instant come first."""
        if self._end_ns <= self._clock.now_ns():
            assert self._timer is not None
            self._timer.cancel()
            self._boundary()

    def submit(self, request: SimRequest) -> None:
        """Queue a new request."""
        self.catch_up()
        request.arrived_ns = self._clock.now_ns()
        blocked = self.queue.head
        self.requests.add(request)
        self.queue.add(request)
        if blocked is None or self.queue.head is request or self.work is Work.NOTHING:
            self._poke()
        # Else the head didn't fit at the last boundary, and a segment only takes pages: nothing can start before.

    def cancel(self, request: SimRequest) -> None:
        """End it: at once, or when the step on its way ends."""
        self.catch_up()
        if request.state is RequestState.GONE or self.work is Work.HALTED:
            return
        if request.state is RequestState.PREFILL:
            request.cancelled = True
        elif request.state is RequestState.RUNNING:
            if not request.cancelled:
                request.cancelled = True
                self._cancels.append(request)
                self._poke()
        else:
            self._withdraw(request)
            self._finish(request, cancelled=True)
            self._emission.deliver()
            self._poke()

    def freeze(self, request: SimRequest) -> "asyncio.Future[bool]":
        """Take a running request out of the batch at the next boundary, or a waiting one out of the queue at once;
        False if it was no longer there."""
        self.catch_up()
        waiter = self._freezes.ask(request)
        if request.state is RequestState.WAITING:
            self.queue.remove(request)
            self._freezes.apply_waiting(request)
        self._poke()
        return waiter

    def thaw(self, request: SimRequest) -> None:
        """Let a frozen request go on."""
        self.catch_up()
        if request.pages:
            request.enter(RequestEvent.RESUME)
            self._joins[request] = None
        else:
            request.enter(RequestEvent.REQUEUE)
            self.queue.add(request)
        self._poke()

    def discard(self, request: SimRequest) -> None:
        """Free a frozen request without an event: it runs elsewhere."""
        self.catch_up()
        self._end(request)
        self._poke()

    def reserve(self, pages: int) -> bool:
        """Promise pages, if there are that many."""
        self.catch_up()
        if pages > self.pool.free - self.taken():
            return False
        if self.work is Work.DECODE:
            rest = self.batch.pages_needed(1, self._segment.steps - 1)
            if pages > self.pool.free - rest:
                self._cut()
        self.pool.reserve(pages)
        return True

    def unreserve(self, pages: int) -> None:
        """Take the promise back."""
        self.catch_up()
        self.pool.unreserve(pages)
        self._poke()

    def insert(self, request: SimRequest, reserved: int) -> None:
        """A request whose KV was copied here joins, one without KV waits; the promised pages are its, or free."""
        self.catch_up()
        request.pages = self.parameters.pages_of(request.computed)
        self.pool.spend(reserved)
        self.pool.give(reserved - request.pages)
        self.requests.add(request)
        self.arrived += request.computed
        if request.computed:
            request.enter(RequestEvent.ARRIVE)
            self._joins[request] = None
        else:
            self.queue.add(request)
        self._poke()

    def start_move(self, request: SimRequest, key: MoveKey) -> None:
        """It goes away from now on; its KV, if it has some, is copied meanwhile."""
        request.move = key
        request.copies = request.state is RequestState.RUNNING
        self.add_copying(request.copies)

    def end_move(self, request: SimRequest) -> None:
        """It no longer is. Idempotent."""
        self.catch_up()
        self._drop_move(request)
        self._poke()

    def add_copying(self, change: int) -> None:
        """Requests are copied out or in: steps that begin now on take longer, or no longer do."""
        self.catch_up()
        self._copying += change
        self._poke()

    def at_boundary(self, action: Action) -> None:
        """Do it when the step on its way ends."""
        self.catch_up()
        self._holds.ask(action)
        self._poke()

    def counts(self, request: SimRequest) -> tuple[int, int]:
        """Its tokens with KV, and of its output, now."""
        self.catch_up()
        if request.state is not RequestState.RUNNING:
            return request.computed, request.generated
        done = self.completed()
        return self.batch.computed(request, done), self.batch.generated(request, done)

    def completed(self) -> int:
        """Of the running segment's steps, ended."""
        return self._segment.completed(self._clock.now_ns()) if self.work is Work.DECODE else 0

    def taken(self, done: int | None = None) -> int:
        """Pages that steps of the running segment took and that the pool will count at its end."""
        done = self.completed() if done is None else done
        return self.batch.pages_needed(1, done) if done else 0

    @property
    def steps(self) -> int:
        """Steps that have ended, ever, those of the running segment excepted."""
        return self.batch.steps + self._prefill_count

    @property
    def running(self) -> int:
        """Requests in the batch, or about to be."""
        return len(self.batch) + len(self._prefill) + len(self._joins)

    def flush(self, requests: Iterable[SimRequest] | None = None) -> None:
        """Deliver the tokens of these (or of all) that exist and weren't delivered."""
        self.catch_up()
        for request in self.batch if requests is None else requests:
            self._emission.progress(request, self.counts(request)[1])
        self._emission.deliver()

    def halt(self) -> None:
        """Do no step any more. What the listener would have got from a step by step run, it gets."""
        if self.work is not Work.HALTED:
            self.flush()
            self._cut()
            self.work = Work.HALTED
            self._end_ns = NEVER
            if self._timer is not None:
                self._timer.cancel()

    # ---- segments and boundaries

    def _poke(self) -> None:
        """Something may have to change at the next boundary."""
        if self.work is Work.DECODE:
            self._cut()
        elif self.work is Work.NOTHING and self._timer is None:
            # Not here: calls of the same instant share one prefill batch.
            self._timer = self._clock.call_at_ns(self._clock.now_ns(), self._wake)

    def _cut(self) -> None:
        """Let the running segment end with the step on its way."""
        if self.work is not Work.DECODE or self._segment.steps == 1:
            return
        done = self.completed()
        self.pool.take(self.taken(done))
        self.batch.advance(done)
        assert self._timer is not None
        self._timer.cancel()
        self._segment = self._segment.last_step(done)
        self._schedule(self._segment.end_ns)

    def _schedule(self, end_ns: int) -> None:
        self._end_ns = end_ns
        self._timer = self._clock.call_at_ns(end_ns, self._due)

    def _due(self) -> None:
        # Once more round the timers: in virtual time whatever else this instant brings comes before, so that the
        # order doesn't depend on when the timer was set, which is where single and skipped steps differ.
        self._timer = self._clock.call_at_ns(self._end_ns, self._boundary)

    def _wake(self) -> None:
        if self.work is Work.NOTHING:
            self._next_work()

    def _boundary(self) -> None:
        """The running work has ended."""
        self._end_ns = NEVER
        if self.work is Work.PREFILL:
            self._finish_prefill()
        elif self.work is Work.DECODE:
            self._finish_segment()
        self._next_work()

    def _next_work(self) -> None:
        self._timer = None
        self.work = Work.NOTHING
        self._apply_cancels()
        self._freezes.apply(self._leave_batch, self._emission.progress)
        if self._emit_steps:
            for request in self.batch:
                self._emission.progress(request, self.batch.generated(request))
        for request in self._joins:
            request.enter(RequestEvent.JOIN)
            self.batch.add(request)
        self._joins.clear()
        self._plan()
        self._emission.deliver()
        self._freezes.tell()

    def _finish_prefill(self) -> None:
        self._prefill_count += 1
        now_ns, admitted = self._clock.now_ns(), self._prefill
        self._prefill = []
        for request in admitted:
            request.generation.prefill(request.generated)
            request.computed = request.known
            self.prefill_tokens += request.known
            request.generated += 1
            if request.preempted_ns is not None:
                request.loss_ns += now_ns - request.preempted_ns
                request.preempted_ns = None
            complete = request.generated >= request.generation.limit
            if complete or request.cancelled:
                self._finish(request, cancelled=not complete)
            else:
                self._emission.progress(request, request.generated)
                request.enter(RequestEvent.PREFILLED)
                self.batch.add(request)

    def _finish_segment(self) -> None:
        batch, steps = self.batch, self._segment.steps
        if steps > 1:
            self.pool.take(batch.pages_needed(1, steps - 1))
        batch.advance(steps)
        for request in batch.finished():
            self._leave_batch(request)
            self._finish(request, cancelled=False)

    def _apply_cancels(self) -> None:
        for request in self._cancels:
            if request.state is RequestState.RUNNING:
                self._leave_batch(request)
                self._finish(request, cancelled=True)
        self._cancels.clear()

    # ---- what to do next

    def _plan(self) -> None:
        now_ns, held_ns = self._clock.now_ns(), self._holds.apply()
        if held_ns:
            self.work = Work.HELD
            self._schedule(now_ns + held_ns)
            return
        while True:
            prefill = admit(self.queue, self.pool, self.parameters, self.timing, now_ns)
            if prefill is not None:
                self._prefill = prefill.requests
                self.work = Work.PREFILL
                self._schedule(now_ns + prefill.duration_ns)
                return
            if not len(self.batch):
                return
            while len(self.batch) and self.batch.pages_needed(0, 1) > self.pool.free:
                self.preempt(self.batch.newest())
            if len(self.batch):
                self._start_segment()
                return

    def _start_segment(self) -> None:
        batch, pool = self.batch, self.pool
        steps = batch.steps_possible(pool.free) if self._skip_steps else 1
        pool.take(batch.pages_needed(0, 1))
        if len(self.queue) and self.queue.head_demand <= pool.free:
            # A preemption may have freed more than the step takes: the head can start when it ends.
            steps = 1
        self._segment = batch.segment(self._clock.now_ns(), self.timing.step_cost(self._copying > 0), steps)
        self.work = Work.DECODE
        self._schedule(self._segment.end_ns)

    def preempt(self, request: SimRequest) -> None:
        """At a boundary: it loses its memory and waits again."""
        self._leave_batch(request)
        self.pool.give(request.pages)
        request.pages = 0
        request.page_generation += 1
        request.preemptions += 1
        request.preempted_ns = self._clock.now_ns()
        request.enter(RequestEvent.PREEMPT)
        request.lost_move = request.move
        self._drop_move(request)
        self.queue.add(request)

    # ---- pieces

    def _leave_batch(self, request: SimRequest) -> None:
        self.batch.remove(request)
        request.pages = self.parameters.pages_of(request.computed)

    def _withdraw(self, request: SimRequest) -> None:
        """Take it from where it waits outside the batch."""
        if request.state is RequestState.WAITING:
            self.queue.remove(request)
        elif request.state is RequestState.JOINING:
            del self._joins[request]

    def _finish(self, request: SimRequest, cancelled: bool) -> None:
        self._emission.finish(request, cancelled)
        self._end(request)

    def _end(self, request: SimRequest) -> None:
        request.enter(RequestEvent.END)
        self.pool.give(request.pages)
        request.pages = 0
        self._drop_move(request)
        self.requests.remove(request)

    def _drop_move(self, request: SimRequest) -> None:
        if request.move is not None:
            request.move = None
            self._copying -= request.copies
