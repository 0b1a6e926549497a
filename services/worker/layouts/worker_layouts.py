"""All changes of one worker's layout, one at a time, and their place on the bus."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable

from meshift.backends.base import Capability, Engine, EngineInfo
from meshift.backends.layouts import LayoutNow, ReconfigurableEngine
from meshift.schemas import subjects
from meshift.schemas.errors import InvalidRequest, PeerTimeout, Stale, Unavailable, Unsupported
from meshift.schemas.identity import Owner
from meshift.schemas.layouts import LayoutRefusal, counts_of
from meshift.schemas.reconfiguring import ChangeStatus, LayoutAsk, LayoutOrder, LayoutReply, LayoutStep
from meshift.services.bus.base import Bus, Subscription
from meshift.services.worker.layouts.change import Change
from meshift.services.worker.layouts.context import LayoutContext
from meshift.services.worker.layouts.counters import LayoutCounters
from meshift.services.worker.layouts.facts import facts_of
from meshift.services.worker.layouts.gate import LayoutGate
from meshift.services.worker.moves.worker_moves import WorkerMoves
from meshift.services.worker.options import WorkerOptions

logger = logging.getLogger(__name__)

ENDED_KEPT = 16
"""Changes remembered: a lost answer is asked for."""


class WorkerLayouts:
    """Of one worker. An engine without `Capability.CHANGE_LAYOUT` refuses all."""

    def __init__(
        self,
        owner: Owner,
        engine: Engine,
        info: EngineInfo,
        gate: LayoutGate,
        moves: WorkerMoves,
        options: WorkerOptions,
        *,
        entered: Callable[[], None],
    ) -> None:
        """`entered`: called whenever the layout has changed."""
        self._owner = owner
        self._engine = (
            engine
            if isinstance(engine, ReconfigurableEngine) and Capability.CHANGE_LAYOUT in info.capabilities
            else None
        )
        self._name = info.name
        self._gate = gate
        self._tell = entered
        self._now: LayoutNow | None = None
        self._open = True
        self._context = LayoutContext(options, gate, engine.load, moves.halt, moves.under_way, self._on_entered)
        self._change: Change | None = None
        self._task: asyncio.Task[None] | None = None
        self._ended: deque[ChangeStatus] = deque(maxlen=ENDED_KEPT)
        self._never: deque[str] = deque(maxlen=ENDED_KEPT)
        """Changes that were to end before they began: a late begin is refused."""

    async def start(self) -> None:
        """Learn the engine's layout. Raises what the engine raises."""
        if self._engine is not None:
            self._take(await self._engine.layout())

    def serve(self, bus: Bus) -> list[Subscription]:
        """Take part on the bus."""
        name = self._owner.instance_id
        return [
            bus.serve("layout", subjects.worker_layout(name), LayoutAsk, self.on_ask),
            bus.serve("layout-step", subjects.worker_layout_step(name), LayoutOrder, self.on_order),
        ]

    @property
    def counters(self) -> LayoutCounters:
        """Live counters."""
        return self._context.counters

    @property
    def layers(self) -> tuple[int, ...]:
        """Of each stage; empty of an engine that doesn't tell."""
        return () if self._now is None else counts_of(self._now.layout.layer_ranges)

    @property
    def epoch(self) -> int:
        """One more with every change."""
        return self._gate.epoch

    @property
    def change_id(self) -> str:
        """Of the change that is under way, or empty."""
        return "" if self._change is None else self._change.change_id

    def refuse(self) -> None:
        """Begin nothing more, and undo what is under way: the instance leaves."""
        self._open = False
        if self._change is not None:
            self._change.give_up(LayoutRefusal.CANCELLED, "the instance leaves")

    def stop(self) -> None:
        """The worker serves no more."""
        self._open = False
        if self._task is not None:
            self._task.cancel()

    # ---- messages

    async def on_ask(self, ask: LayoutAsk) -> LayoutReply:
        """An endpoint. Raises Stale, Unsupported, Unavailable, PeerTimeout."""
        self._check_owner(ask.owner)
        change = self._change
        if change is not None and ask.change_id == change.change_id:
            change.renew()
            await change.refresh()
        return await self._reply(ask.change_id)

    async def on_order(self, order: LayoutOrder) -> LayoutReply:
        """An endpoint."""
        self._check_owner(order.owner)
        if order.step is LayoutStep.BEGIN:
            return await self._on_begin(order)
        change = self._change if self._change is not None and self._change.change_id == order.change_id else None
        if change is not None and order.step is LayoutStep.ABORT:
            await change.undo(order.refusal or LayoutRefusal.CANCELLED, order.reason or "it was to end")
        elif change is not None:
            await change.obey(order.step)
        elif self._ended_of(order.change_id) is None:
            if order.step is LayoutStep.ABORT:
                self._never.append(order.change_id)
            return await self._refused(LayoutRefusal.UNKNOWN, f"there is no change {order.change_id} here")
        return await self._reply(order.change_id)

    async def _on_begin(self, order: LayoutOrder) -> LayoutReply:
        if order.orders is None:
            raise InvalidRequest("a change begins with its orders", param="orders")
        if self._ended_of(order.change_id) is not None:
            return await self._reply(order.change_id)
        if order.change_id in self._never:
            return await self._refused(LayoutRefusal.CANCELLED, f"{order.change_id} was to end before it began")
        now = await self._ask_engine()
        running = self._change
        if running is not None and running.change_id != order.change_id:
            return await self._refused(LayoutRefusal.BUSY, f"{running.change_id} is under way")
        if not self._open:
            return await self._refused(LayoutRefusal.BUSY, f"{self._owner} leaves")
        if running is None:
            engine = self._require()
            running = self._change = Change(self._context, engine, order.change_id, order.orders, now)
            self._task = asyncio.get_running_loop().create_task(running.run())
            self._task.add_done_callback(self._done)
        await running.obey(LayoutStep.BEGIN)
        return await self._reply(order.change_id)

    async def _reply(self, change_id: str | None) -> LayoutReply:
        now = await self._ask_engine()
        change = self._change.status() if self._change is not None else None
        if change_id is not None and (change is None or change.change_id != change_id):
            change = self._ended_of(change_id)
        return LayoutReply(owner=self._owner, facts=facts_of(now, self._context.load()), change=change)

    async def _refused(self, refusal: LayoutRefusal, reason: str) -> LayoutReply:
        reply = await self._reply(None)
        return reply.model_copy(update={"refusal": refusal, "reason": reason})

    # ---- pieces

    async def _ask_engine(self) -> LayoutNow:
        try:
            async with asyncio.timeout(self._context.options.layout_timeout_s):
                self._now = await self._require().layout()
        except TimeoutError as error:
            raise PeerTimeout("the engine's ranks didn't answer in time") from error
        except ConnectionError as error:
            raise Unavailable(f"the engine is gone: {error}") from error
        return self._now

    def _require(self) -> ReconfigurableEngine:
        if self._engine is None:
            raise Unsupported(f"layers of this {self._name} engine don't move", param="instance_id")
        return self._engine

    def _on_entered(self, now: LayoutNow) -> None:
        self._take(now)
        self._tell()

    def _take(self, now: LayoutNow) -> None:
        self._now = now
        self._gate.epoch = now.layout.epoch
        if now.kv is not None:
            self._gate.kv = now.kv

    def _ended_of(self, change_id: str) -> ChangeStatus | None:
        return next((ended for ended in self._ended if ended.change_id == change_id), None)

    def _check_owner(self, owner: Owner | None) -> None:
        if owner is not None and owner != self._owner:
            raise Stale(f"this is {self._owner}, not {owner}")

    def _done(self, task: "asyncio.Task[None]") -> None:
        change, self._change, self._task = self._change, None, None
        assert change is not None
        self._ended.append(change.status())
        with contextlib.suppress(asyncio.CancelledError):
            if task.exception() is not None:
                logger.error("%s: its end is a bug", change.change_id, exc_info=task.exception())
