"""Changes of an instance's layout, in the worker: commands to the ranks, and what their answers mean.

    begin ----> load, start_migration ----> commit: drain, flush, switch    (or: lag)
      |___________________ abort, or the ranks' own deadline _____|

A draining commit is in the log with its `SwitchLayers`: until then whatever fails is taken back.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from meshift.backends.layouts import (
    Layout,
    LayoutChange,
    LayoutEnd,
    LayoutNow,
    LayoutProgress,
    LayoutRefused,
    StageMemory,
)
from meshift.backends.sglang import wire_layers as wire
from meshift.backends.sglang.instance import RankInstance
from meshift.backends.sglang.layer_orders import LayerOrders
from meshift.backends.sglang.layer_plan import check_target, layer_pairs
from meshift.backends.sglang.questions import Question, same
from meshift.backends.sglang.settings import SglangSettings
from meshift.backends.sglang.wire import RankReady
from meshift.backends.sglang.wire_moves import TargetAddress
from meshift.kv_memory.layout import KvLayout
from meshift.schemas.layouts import CommitMode, LayoutRefusal, StageProgress

SETTLE_TIMEOUT_S = 120.0
ENDED_MAX = 64
POLL_S = 0.01
"""Of weights that are loaded while nothing steps."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Switched:
    """How a commit went; see `LayoutCommitted`."""

    commit: CommitMode
    stop_ns: tuple[int, ...]
    last_patch_tokens: int
    last_patch_bytes: int
    duration_ns: int


@dataclass(slots=True)
class _Running:
    """The change that is under way."""

    change: LayoutChange
    pairs: list[wire.LayerPair]
    bytes_per_s: float | None = None
    loads: bool = False
    copies: bool = False
    committing: bool = False
    cancelled: bool = False
    """To be taken back, if it still can be."""
    expired: set[int] = field(default_factory=set)
    """Ranks that have undone it by themselves."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class LayerChanges:
    """The ranks hold the truth; here is which layout there is, and which change."""

    def __init__(self, instance: RankInstance, settings: SglangSettings, on_switched: Callable[[Layout], None]) -> None:
        """`on_switched` is called as soon as the ranks have new layers."""
        self._ranks = LayerOrders(instance)
        self._settings = settings
        self._on_switched = on_switched
        self._facts: list[wire.LayerFacts] = []
        self._layers = self._page_tokens = self._capacity_max = 0
        self._running: _Running | None = None
        self._ended: deque[LayoutEnd] = deque(maxlen=ENDED_MAX)
        self._settling: asyncio.Task[None] | None = None
        self.layout = Layout(((0, 0),), 0, 1)

    def start(self, ranks: Sequence[RankReady]) -> None:
        """The ranks are there."""
        stages = ranks[:: self._settings.tensor_ranks]
        ranges = tuple((rank.share.layer_start, rank.share.layer_end) for rank in stages)
        self._facts = [rank.movable for rank in ranks]
        self._layers, self._page_tokens = ranks[0].layers, ranks[0].page_size
        self._capacity_max = self._settings.capacity_tokens_max or ranks[0].capacity
        self.layout = Layout(ranges, 0, max(fact.layers_per_group for fact in self._facts))

    @property
    def obstacle(self) -> str:
        """Why layers can't move; empty if they can."""
        return next((fact.obstacle for fact in self._facts if fact.obstacle), "")

    @property
    def change_id(self) -> str | None:
        """Of the change that is under way."""
        return self._running.change.change_id if self._running else None

    def now(self, kv: KvLayout | None, capacity: int) -> LayoutNow:
        """See `ReconfigurableEngine.layout`."""
        return LayoutNow(
            layout=self.layout,
            kv=kv,
            stages=tuple(
                StageMemory(self._settings.stage_bytes_max, fact.fixed_bytes, fact.layer_bytes, fact.block_bytes)
                for fact in self._facts[:: self._settings.tensor_ranks]
            ),
            page_tokens=self._page_tokens,
            capacity=capacity,
            capacity_max=self._capacity_max,
            change_id=self.change_id,
            ended=tuple(self._ended),
        )

    # ---- steps ----

    async def begin(self, change: LayoutChange) -> None:
        """See `ReconfigurableEngine.begin_layout`."""
        if self._running is not None and self._running.change == change:
            return
        if any(end.change_id == change.change_id for end in self._ended):
            raise LayoutRefused(f"change {change.change_id} has ended", LayoutRefusal.UNKNOWN)
        if self._running is not None:
            raise LayoutRefused(f"change {self.change_id} is under way", LayoutRefusal.BUSY)
        check_target(change, self.layout, self._layers)
        if self.obstacle or change.flags.restart:
            raise LayoutRefused(self.obstacle or "it can't restart by itself", LayoutRefusal.UNSUPPORTED)
        pairs = layer_pairs(change.change_id, self.layout.layer_ranges, change.target, self._settings.tensor_ranks)
        running = self._running = _Running(change, pairs)
        try:
            if self._settling is not None:
                await asyncio.shield(self._settling)
            await self._ranks.order(
                lambda nonce: wire.BeginLayers(
                    nonce=nonce,
                    change_id=change.change_id,
                    target=list(change.target),
                    pairs=pairs,
                    deadline_s=change.deadline_s,
                    verify=self._settings.verify_moves,
                ),
                wire.LayersDone,
            )
        except LayoutRefused as error:
            self._end(running, error.refusal, str(error))
            raise

    async def load(self, change_id: str) -> None:
        """See `ReconfigurableEngine.load_weights`."""
        running = self._find(change_id)
        if not running.loads:
            await self._ranks.order(lambda nonce: wire.LoadLayers(nonce=nonce, change_id=change_id), wire.LayersDone)
            running.loads = True

    async def copy(self, change_id: str, bytes_per_s: float | None) -> None:
        """See `ReconfigurableEngine.start_kv_migration`."""
        running = self._find(change_id)
        if running.copies:
            return
        opened = await self._ranks.order(
            lambda nonce: wire.OpenLayers(nonce=nonce, change_id=change_id), wire.LayersOpened
        )
        found: dict[int, TargetAddress] = dict(one for answer in opened for one in answer.addresses)
        addresses = [found[index] for index in range(len(running.pairs))]
        await self._ranks.order(
            lambda nonce: wire.SendLayers(
                nonce=nonce, change_id=change_id, addresses=addresses, bytes_per_s=bytes_per_s
            ),
            wire.LayersDone,
        )
        running.copies = True

    async def progress(self, change_id: str) -> LayoutProgress:
        """See `ReconfigurableEngine.layout_progress`."""
        running = self._find(change_id)
        ranks = await self._ranks.order(lambda nonce: wire.AskLayers(nonce=nonce, change_id=change_id), wire.LayersAt)
        per_stage = self._settings.tensor_ranks
        stages = [ranks[start : start + per_stage] for start in range(0, len(ranks), per_stage)]
        destinations = {pair.destination // per_stage for pair in running.pairs}
        return LayoutProgress(
            change_id,
            tuple(_stage_progress(index, stages[index]) for index in sorted(destinations)),
            ranks[0].scheduled_tokens,
            next((rank.problem for rank in ranks if rank.problem), ""),
        )

    async def abort(self, change_id: str) -> None:
        """See `ReconfigurableEngine.abort_layout`."""
        running = self._running
        if running is None or running.change.change_id != change_id:
            if all(end.change_id != change_id for end in self._ended):
                self._remember(change_id, LayoutRefusal.CANCELLED, "it was aborted before it began")
            return
        if running.committing:
            running.cancelled = True
            await running.ended.wait()
        if self._running is not running:
            return
        await self._ranks.order(
            lambda nonce: wire.AbortLayers(nonce=nonce, change_id=change_id), wire.LayersDone, SETTLE_TIMEOUT_S
        )
        if self._running is running:
            self._end(running, LayoutRefusal.CANCELLED, "it was aborted")

    def note_expired(self, report: wire.LayersExpired) -> None:
        """A rank has undone the change, its deadline being over."""
        running = self._running
        if running is not None and running.change.change_id == report.change_id:
            running.expired.add(report.rank)
            if len(running.expired) == self._settings.rank_count:
                self._end(running, LayoutRefusal.DEADLINE, "it wasn't committed in time")

    # ---- commit ----

    async def commit(self, change_id: str, mode: CommitMode, timeout_s: float) -> Switched:
        """See `ReconfigurableEngine.commit_layout`. To be run to its end."""
        running = self._find(change_id)
        if running.committing:
            raise LayoutRefused(f"{change_id} is being committed", LayoutRefusal.BUSY)
        running.committing = True
        running.ended.clear()
        try:
            await self._check_ready(running)
            flags = running.change.flags
            lags = mode is CommitMode.LAG and not (flags.no_patch or flags.no_async)
            with ExitStack() as asked:
                settled = asked.enter_context(self._ranks.ask())
                commit = self._commit_lagging if lags else self._commit_drained
                began_ns = time.monotonic_ns()
                switched = await commit(running, settled.nonce, timeout_s)
                self._note_switched(running)
                self._settling = asyncio.get_running_loop().create_task(self._settle(asked.pop_all(), settled))
        finally:
            running.committing = False
            running.ended.set()
        return self._summary(switched, CommitMode.LAG if lags else CommitMode.DRAIN, time.monotonic_ns() - began_ns)

    async def _check_ready(self, running: _Running) -> None:
        flags, change_id = running.change.flags, running.change.change_id
        progress = await self.progress(change_id)
        if progress.failure:
            raise LayoutRefused(progress.failure, LayoutRefusal.BROKEN)
        if not (flags.no_async or progress.weights_loaded):
            raise LayoutRefused("weights aren't there yet", LayoutRefusal.NOT_READY)
        if not (flags.no_patch or running.copies):
            raise LayoutRefused("KV isn't copied yet", LayoutRefusal.NOT_READY)

    async def _commit_lagging(self, running: _Running, settled: int, timeout_s: float) -> list[wire.LayersSwitched]:
        change_id = running.change.change_id
        return await self._ranks.order(
            lambda nonce: wire.CommitLayers(nonce=nonce, settled_nonce=settled, change_id=change_id),
            wire.LayersSwitched,
        )

    async def _commit_drained(self, running: _Running, settled: int, timeout_s: float) -> list[wire.LayersSwitched]:
        change_id = running.change.change_id
        try:
            async with asyncio.timeout(timeout_s):
                await self._drain(running)
            if running.cancelled:
                raise LayoutRefused("it was aborted", LayoutRefusal.CANCELLED)
        except (LayoutRefused, TimeoutError) as error:
            await self._ranks.order(
                lambda nonce: wire.SwitchLayers(nonce=nonce, settled_nonce=0, change_id=change_id, goes=False),
                wire.LayersDone,
            )
            if isinstance(error, TimeoutError):
                raise LayoutRefused(f"not ready within {timeout_s:g} s", LayoutRefusal.DEADLINE) from None
            raise
        return await self._ranks.order(
            lambda nonce: wire.SwitchLayers(nonce=nonce, settled_nonce=settled, change_id=change_id, goes=True),
            wire.LayersSwitched,
        )

    async def _drain(self, running: _Running) -> None:
        """Until nothing is launched, and nothing lags. Raises LayoutRefused."""
        change_id, flags = running.change.change_id, running.change.flags
        _healthy(
            await self._ranks.order(
                lambda nonce: wire.DrainLayers(nonce=nonce, change_id=change_id), wire.LayersDone, SETTLE_TIMEOUT_S
            )
        )
        if flags.no_async:
            await self._load_now(running)
        if flags.no_patch:
            await self.copy(change_id, running.bytes_per_s)
            _healthy(
                await self._ranks.order(
                    lambda nonce: wire.FlushLayers(nonce=nonce, change_id=change_id), wire.LayersDone, SETTLE_TIMEOUT_S
                )
            )

    async def _load_now(self, running: _Running) -> None:
        change_id = running.change.change_id
        await self.load(change_id)
        while not (progress := await self.progress(change_id)).weights_loaded:
            if progress.failure:
                raise LayoutRefused(progress.failure, LayoutRefusal.BROKEN)
            await asyncio.sleep(POLL_S)

    def _note_switched(self, running: _Running) -> None:
        change = running.change
        self.layout = replace(self.layout, layer_ranges=change.target, epoch=self.layout.epoch + 1)
        self._ended.append(LayoutEnd(change.change_id, True, self.layout.epoch))
        self._running = None
        self._on_switched(self.layout)

    async def _settle(self, asked: ExitStack, question: Question) -> None:
        """Until memory of layers that left is free; the next change waits for it."""
        with asked, contextlib.suppress(TimeoutError, ConnectionError):
            await question.answers(SETTLE_TIMEOUT_S)

    def _summary(self, switched: list[wire.LayersSwitched], mode: CommitMode, duration_ns: int) -> Switched:
        same([rank.switched_at for rank in switched], "points of the switch")
        for index in {index for rank in switched for index, _ in rank.hashes}:
            same([text for rank in switched for other, text in rank.hashes if other == index], "KV of moved layers")
        per_stage = self._settings.tensor_ranks
        stages = [switched[start : start + per_stage] for start in range(0, len(switched), per_stage)]
        result = Switched(
            mode,
            tuple(max(rank.stop_ns for rank in stage) for stage in stages),
            max(rank.tokens for rank in switched),
            sum(rank.byte_count for rank in switched),
            duration_ns,
        )
        logger.info("layers moved: %s, the switch itself %s us", result, [rank.switch_ns // 1000 for rank in switched])
        return result

    # ---- what there is ----

    def _find(self, change_id: str) -> _Running:
        running = self._running
        if running is None or running.change.change_id != change_id:
            raise LayoutRefused(f"no change {change_id} is under way", LayoutRefusal.UNKNOWN)
        return running

    def _end(self, running: _Running, refusal: LayoutRefusal, reason: str) -> None:
        """Undone: everything is as it was."""
        self._running = None
        self._remember(running.change.change_id, refusal, reason)

    def _remember(self, change_id: str, refusal: LayoutRefusal, reason: str) -> None:
        self._ended.append(LayoutEnd(change_id, False, self.layout.epoch, refusal, reason))


def _healthy(answers: Sequence[wire.LayersDone]) -> None:
    for answer in answers:
        if answer.problem:
            raise LayoutRefused(answer.problem, LayoutRefusal.BROKEN)


def _stage_progress(stage: int, ranks: Sequence[wire.LayersAt]) -> StageProgress:
    """Of the tensor rank that is furthest behind."""
    lag = max(rank.scheduled_tokens - max(rank.applied_tokens, 0) for rank in ranks)
    return StageProgress(
        stage=stage,
        layers=ranks[0].layers,
        layers_loaded=min(rank.layers_loaded for rank in ranks),
        lag_tokens=max(0, lag),
        byte_count=sum(rank.byte_count for rank in ranks),
        rounds=min(rank.rounds for rank in ranks),
    )
