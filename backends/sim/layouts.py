"""The simulated engine's layout, and changes of it: `ReconfigurableEngine`, but for resizing."""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from meshift.backends.layouts import (
    Layout,
    LayoutChange,
    LayoutCommitted,
    LayoutEnd,
    LayoutNow,
    LayoutProgress,
    LayoutRefused,
)
from meshift.backends.sim.accounting import scheduled
from meshift.backends.sim.clock import NANOSECONDS, Clock
from meshift.backends.sim.core import EngineCore
from meshift.backends.sim.layer_copies import LayerCopy, Patch
from meshift.backends.sim.lifecycle import RequestState
from meshift.backends.sim.pipeline import SimPipeline, Timing
from meshift.backends.sim.resizing import Resizing
from meshift.kv_memory.layout import KvLayout, Range
from meshift.schemas.layouts import CommitMode, LayoutRefusal, StageProgress, split_of

ENDED_KEPT = 16


@dataclass(slots=True)
class _Change:
    change: LayoutChange
    copies: tuple[LayerCopy, ...]
    deadline: asyncio.TimerHandle
    added: dict[int, int]
    """Layers that each destination gets."""
    loaded: dict[int, int]
    timers: dict[asyncio.TimerHandle, None] = field(default_factory=dict)
    loading: bool = False
    copying: bool = False
    in_log: bool = False
    """COMMIT is in the log."""
    failure: str = ""


class Layouts:
    """One change at a time."""

    def __init__(
        self, core: EngineCore, clock: Clock, pipeline: SimPipeline, resizing: Resizing, kv: KvLayout | None
    ) -> None:
        self._core = core
        self._clock = clock
        self._pipeline = pipeline
        self._resizing = resizing
        self._kv = kv
        self._layout = Layout(split_of(pipeline.layers), 0, pipeline.layers_per_group)
        self._change: _Change | None = None
        self._ended: deque[LayoutEnd] = deque(maxlen=ENDED_KEPT)
        core.timing = Timing(core.parameters, pipeline, self._layout.layer_ranges)

    def now(self) -> LayoutNow:
        """See `ReconfigurableEngine`."""
        core = self._core
        return LayoutNow(
            layout=self._layout,
            kv=self._kv,
            stages=self._pipeline.memory(core.parameters),
            page_tokens=core.parameters.page_size,
            capacity=core.pool.capacity * core.parameters.page_size,
            capacity_max=self._resizing.pages_max * core.parameters.page_size,
            change_id=None if self._change is None else self._change.change.change_id,
            ended=tuple(self._ended),
        )

    def begin(self, change: LayoutChange) -> None:
        """Raises LayoutRefused."""
        running = self._change
        if running is not None and running.change.change_id == change.change_id:
            return
        self._check(change)
        target = change.target
        added = {stage: self._gained(stage, target) for stage in range(len(target))}
        added = {stage: count for stage, count in added.items() if count}
        when_ns = self._clock.now_ns() + round(change.deadline_s * NANOSECONDS)
        self._change = _Change(
            change,
            tuple(LayerCopy(self._core, *pair) for pair in _pairs(self._layout.layer_ranges, target)),
            self._clock.call_at_ns(when_ns, self.end, change.change_id, LayoutRefusal.DEADLINE, "its deadline came"),
            added,
            dict.fromkeys(added, 0),
        )
        self._resizing.held = "a change of the layout is under way"

    def load(self, change_id: str) -> None:
        """Raises LayoutRefused."""
        change = self._require(change_id)
        self._check_room(change)
        if not change.loading:
            change.loading = True
            for stage in change.added:
                self._load_next(change, stage)

    def copy(self, change_id: str, bytes_per_s: float | None) -> None:
        """Raises LayoutRefused."""
        change = self._require(change_id)
        self._check_room(change)
        if not change.copying:
            change.copying = True
            rate = min(bytes_per_s or self._pipeline.copy_bytes_per_s, self._pipeline.copy_bytes_per_s)
            self._core.add_copying(1)
            for source in sorted({copy.source for copy in change.copies}):
                mine = [copy for copy in change.copies if copy.source == source]
                self._send(change, mine, 0, rate)

    def progress(self, change_id: str) -> LayoutProgress:
        """Raises LayoutRefused."""
        change = self._require(change_id)
        self._core.catch_up()
        stages = []
        for stage, count in change.added.items():
            into = [copy for copy in change.copies if copy.destination == stage]
            stages.append(
                StageProgress(
                    stage=stage,
                    layers=count,
                    layers_loaded=change.loaded[stage],
                    lag_tokens=max(copy.lag for copy in into),
                    byte_count=sum(copy.byte_count for copy in into),
                    rounds=min(copy.rounds for copy in into),
                )
            )
        return LayoutProgress(change_id, tuple(stages), scheduled(self._core), change.failure)

    async def commit(self, change_id: str, commit: CommitMode, timeout_s: float) -> LayoutCommitted:
        """Raises LayoutRefused, TimeoutError, ConnectionError."""
        change = self._require(change_id)
        self._check_committable(change)
        change.in_log = True
        change.deadline.cancel()
        done = self._clock.future()
        asked_ns = self._clock.now_ns()
        self._core.at_boundary(lambda: self._switch(change, self._mode(change, commit), asked_ns, done))
        until_ns = asked_ns + round(timeout_s * NANOSECONDS)
        return await self._clock.wait_or_lose(done, until_ns)  # type: ignore[no-any-return]

    def end(self, change_id: str, refusal: LayoutRefusal = LayoutRefusal.CANCELLED, reason: str = "aborted") -> None:
        """Undo it, unless COMMIT is in the log. Idempotent."""
        change = self._change
        if change is None or change.change.change_id != change_id:
            if all(end.change_id != change_id for end in self._ended):
                self._ended.append(LayoutEnd(change_id, False, self._layout.epoch, refusal, reason))
        elif not change.in_log:
            self._close(change)
            self._ended.append(LayoutEnd(change_id, False, self._layout.epoch, refusal, change.failure or reason))

    def break_change(self, reason: str) -> None:
        """A fault: what is under way can only be aborted."""
        if self._change is not None and not self._change.in_log:
            self._change.failure = reason
            self._stop(self._change)

    def stop(self) -> None:
        """The engine ends."""
        if self._change is not None:
            self._stop(self._change)
            self._change.deadline.cancel()

    # ---- weights and KV, in the background

    def _load_next(self, change: _Change, stage: int) -> None:
        if change.loaded[stage] < change.added[stage]:
            pipeline = self._pipeline
            took_ns = pipeline.layer_weight_bytes * NANOSECONDS // pipeline.load_bytes_per_s
            self._later(change, took_ns, self._loaded, change, stage)

    def _loaded(self, change: _Change, stage: int) -> None:
        change.loaded[stage] += 1
        self._load_next(change, stage)

    def _send(self, change: _Change, copies: list[LayerCopy], turn: int, rate: float) -> None:
        """A round of one pair; the pairs of one source take turns."""
        self._core.catch_up()
        copy = copies[turn % len(copies)]
        patch = copy.drain()
        took_ns = self._core.parameters.copy_round_ns + round(self._bytes(copy, patch) * NANOSECONDS / rate)
        self._later(change, took_ns, self._applied, change, copies, turn, rate, patch)

    def _applied(self, change: _Change, copies: list[LayerCopy], turn: int, rate: float, patch: Patch) -> None:
        copy = copies[turn % len(copies)]
        copy.apply(patch, self._bytes(copy, patch))
        self._send(change, copies, turn + 1, rate)

    def _later(self, change: _Change, after_ns: int, act: object, *args: object) -> None:
        def run() -> None:
            change.timers.pop(timer, None)
            if not change.in_log:
                act(*args)  # type: ignore[operator]

        timer = self._clock.call_at_ns(self._clock.now_ns() + max(1, after_ns), run)
        change.timers[timer] = None

    def _bytes(self, copy: LayerCopy, patch: Patch) -> int:
        return self._pipeline.kv_bytes(self._core.parameters, patch.tokens, copy.layer_count)

    # ---- the commit

    def _switch(self, change: _Change, mode: CommitMode, asked_ns: int, done: "asyncio.Future[LayoutCommitted]") -> int:
        """At a boundary: no step runs. Returns how long none may begin."""
        self._stop(change)
        sizes, tokens = {}, 0
        for copy in change.copies:
            patch = copy.drain()
            sizes[copy] = self._bytes(copy, patch)
            tokens = max(tokens, patch.tokens)
            copy.apply(patch, sizes[copy])
        stop_ns = self._stop_ns(change, mode, sizes)
        if change.change.flags.restart:
            while len(self._core.batch):
                self._core.preempt(self._core.batch.newest())
        else:
            for copy in change.copies:
                copy.take_over()
        self._close(change)
        self._enter(change.change.target)
        self._ended.append(LayoutEnd(change.change.change_id, True, self._layout.epoch))
        self._clock.call_at_ns(
            self._clock.now_ns() + max(stop_ns),
            _tell,
            done,
            LayoutCommitted(
                now=self.now(),
                commit=mode,
                stop_ns=stop_ns,
                last_patch_tokens=tokens,
                last_patch_bytes=sum(sizes.values()),
                duration_ns=self._clock.now_ns() + max(stop_ns) - asked_ns,
            ),
        )
        return max(stop_ns)

    def _stop_ns(self, change: _Change, mode: CommitMode, sizes: dict[LayerCopy, int]) -> tuple[int, ...]:
        """How long each stage is held back."""
        pipeline, flags = self._pipeline, change.change.flags
        stages = range(len(pipeline.stages))
        load = {
            stage: (count - change.loaded[stage]) * pipeline.layer_weight_bytes for stage, count in change.added.items()
        }
        if flags.restart:
            held = [end - start for start, end in change.change.target]
            slowest = max(held) * pipeline.layer_weight_bytes
            whole = self._core.parameters.cold_start_ns + slowest * NANOSECONDS // pipeline.load_bytes_per_s
            return tuple(max(1, whole) for _ in stages)
        copy_ns = {
            stage: sum(size for copy, size in sizes.items() if stage in (copy.source, copy.destination))
            * NANOSECONDS
            // pipeline.copy_bytes_per_s
            for stage in stages
        }
        load_ns = {stage: load.get(stage, 0) * NANOSECONDS // pipeline.load_bytes_per_s for stage in stages}
        base_ns = pipeline.lag_ns if mode is CommitMode.LAG else pipeline.drain_ns
        return tuple(max(1, base_ns + max(copy_ns[stage], load_ns[stage])) for stage in stages)

    def _mode(self, change: _Change, asked: CommitMode) -> CommitMode:
        """Only neighbours can switch in their stride."""
        near = all(abs(copy.source - copy.destination) == 1 for copy in change.copies)
        return asked if near and not change.change.flags.restart else CommitMode.DRAIN

    def _enter(self, target: tuple[Range, ...]) -> None:
        self._layout = Layout(target, self._layout.epoch + 1, self._layout.layers_per_group)
        if self._kv is not None:
            kv = self._kv
            self._kv = KvLayout(target, kv.head_ranges, kv.head_dim, kv.dtype, kv.weights)
        self._core.timing = Timing(self._core.parameters, self._pipeline, target)

    # ---- pieces

    def _check(self, change: LayoutChange) -> None:
        if any(end.change_id == change.change_id for end in self._ended):
            raise LayoutRefused(f"{change.change_id} has ended here", LayoutRefusal.UNKNOWN)
        if self._change is not None:
            raise LayoutRefused(f"{self._change.change.change_id} is under way", LayoutRefusal.BUSY)
        if change.epoch != self._layout.epoch:
            message = f"planned for epoch {change.epoch}, and this is {self._layout.epoch}"
            raise LayoutRefused(message, LayoutRefusal.STALE)
        target, here = change.target, self._layout
        if target == here.layer_ranges:
            raise LayoutRefused("that is its layout", LayoutRefusal.UNCHANGED)
        bounds = [0, *(end for _, end in target)]
        follows = all(start == bounds[stage] <= end for stage, (start, end) in enumerate(target))
        if len(target) != len(here.layer_ranges) or not follows or bounds[-1] != self._pipeline.total:
            raise LayoutRefused(f"{target} is no split of {self._pipeline.total} layers", LayoutRefusal.INVALID)
        if any(bound % here.layers_per_group for bound in bounds[:-1] if bound != self._pipeline.total):
            raise LayoutRefused(f"{target} cuts groups of {here.layers_per_group}", LayoutRefusal.UNALIGNED)

    def _check_room(self, change: _Change) -> None:
        """Raises LayoutRefused if a stage hasn't the memory for both layouts' layers and the capacity of now."""
        if change.failure:
            raise LayoutRefused(change.failure, LayoutRefusal.BROKEN)
        k, page = self._pipeline.layers_per_group, self._core.pool.capacity
        for stage, memory in enumerate(self._pipeline.memory(self._core.parameters)):
            spans = (self._layout.layer_ranges[stage], change.change.target[stage])
            layers = {layer for span in spans for layer in range(*span)}
            groups = len({layer // k for layer in layers})
            need = memory.reserve + len(layers) * memory.layer_weights + groups * page * memory.block
            if memory.budget is not None and layers and need > memory.budget:
                message = f"stage {stage} needs {need} bytes and has {memory.budget}"
                raise LayoutRefused(message, LayoutRefusal.NO_MEMORY)

    def _check_committable(self, change: _Change) -> None:
        flags = change.change.flags
        if change.failure:
            raise LayoutRefused(change.failure, LayoutRefusal.BROKEN)
        if change.in_log:
            raise LayoutRefused("COMMIT is in the log already", LayoutRefusal.BUSY)
        if any(request.state is RequestState.FROZEN for request in self._core.requests) or self._core.pool.reserved:
            raise LayoutRefused("a request moves", LayoutRefusal.BUSY)
        ready = change.loaded == change.added or flags.no_async
        copied = all(copy.rounds for copy in change.copies) or flags.no_patch
        if not flags.restart and not (ready and copied):
            raise LayoutRefused("weights or KV are missing", LayoutRefusal.NOT_READY)

    def _require(self, change_id: str) -> _Change:
        if self._change is None or self._change.change.change_id != change_id:
            raise LayoutRefused(f"no change {change_id} here", LayoutRefusal.UNKNOWN)
        return self._change

    def _gained(self, stage: int, target: tuple[Range, ...]) -> int:
        here = range(*self._layout.layer_ranges[stage])
        return sum(layer not in here for layer in range(*target[stage]))

    def _stop(self, change: _Change) -> None:
        for timer in change.timers:
            timer.cancel()
        change.timers.clear()

    def _close(self, change: _Change) -> None:
        self._stop(change)
        change.deadline.cancel()
        self._change = None
        self._resizing.held = ""
        if change.copying:
            self._core.add_copying(-1)


def _pairs(current: tuple[Range, ...], target: tuple[Range, ...]) -> list[tuple[int, int, Range]]:
    """Source, destination, layers."""
    found = []
    for source, (begin, end) in enumerate(current):
        for destination, (low, high) in enumerate(target):
            span = (max(begin, low), min(end, high))
            if source != destination and span[0] < span[1]:
                found.append((source, destination, span))
    return found


def _tell(done: "asyncio.Future[LayoutCommitted]", committed: LayoutCommitted) -> None:
    if not done.done():
        done.set_result(committed)
