"""What the engine reports of its memory, and the check that it is true."""

from meshift.backends.base import ClassUsage, EngineLoad
from meshift.backends.sim.core import EngineCore
from meshift.backends.sim.lifecycle import RequestState
from meshift.backends.sim.work import Work

RUNS = frozenset((RequestState.PREFILL, RequestState.JOINING, RequestState.RUNNING))
"""What `running` counts."""


def snapshot(core: EngineCore) -> EngineLoad:
    """As of now, also amid a segment of many steps."""
    core.catch_up()
    page_size, pool, queue = core.parameters.page_size, core.pool, core.queue
    done, running = core.completed(), core.running
    taken = core.taken(done)
    used, waiting = pool.used + taken, len(queue)
    return EngineLoad(
        capacity=pool.capacity * page_size,
        used=used * page_size,
        cached=0,
        free=(pool.free - taken) * page_size,
        reserved=pool.reserved * page_size,
        running=running,
        waiting=waiting,
        head_demand=queue.head_demand * page_size if waiting else 0,
        queued_demand=queue.demand * page_size,
        step_count=core.steps + done,
        usages=usages(core, running, used) if running else (),
        prefill_tokens=core.prefill_tokens,
    )


def scheduled(core: EngineCore) -> int:
    """Tokens whose KV was written here, ever: T_sched."""
    return core.prefill_tokens + core.batch.decoded + core.completed() * len(core.batch) + core.arrived


def usages(core: EngineCore, running: int, used: int) -> tuple[ClassUsage, ...]:
    """The running requests, so many, with so many pages, by execution priority."""
    if not core.requests.has_priorities:
        return (ClassUsage(0, running, used * core.parameters.page_size),)
    page_size, pages_of = core.parameters.page_size, core.parameters.pages_of
    requests: dict[int, int] = {}
    tokens: dict[int, int] = {}
    for request in core.requests:
        if request.state not in RUNS:
            continue
        execution = request.priority.execution
        requests[execution] = requests.get(execution, 0) + 1
        pages = pages_of(core.counts(request)[0]) if request.state is RequestState.RUNNING else request.pages
        tokens[execution] = tokens.get(execution, 0) + pages * page_size
    return tuple(ClassUsage(execution, requests[execution], tokens[execution]) for execution in sorted(requests))


def check(core: EngineCore, promised: int) -> None:
    """Raise AssertionError unless the pages in use are those of the requests, and the reserved ones those `promised`
    to moves. A halted engine isn't looked at."""
    core.catch_up()
    if core.work is Work.HALTED:
        return
    core.batch.check()
    pool, pages_of = core.pool, core.parameters.pages_of
    held = sum(request.pages for request in core.requests if request.state is not RequestState.RUNNING)
    held += sum(pages_of(request.computed + core.batch.steps - request.entry_step) for request in core.batch)
    if core.work is Work.DECODE:
        held += core.batch.pages_needed(0, 1)
    assert pool.used == held, f"{pool.used} pages in use, requests hold {held}"
    assert pool.reserved == promised, f"{pool.reserved} pages reserved, {promised} promised"
    assert pool.free >= core.taken(), f"{pool.free} pages free, {core.taken()} taken amid a segment"
    demand = sum(core.queue.pages_of(request) for request in core.queue)
    assert core.queue.demand == demand, f"queued demand {core.queue.demand} is really {demand}"
    if not len(core.requests) and not promised:
        assert pool.free == pool.capacity, f"idle with {pool.free} of {pool.capacity} pages free"
