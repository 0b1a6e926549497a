"""What an engine must do whose layout changes while it serves (`backends/layouts.py`).

An engine's own test module inherits the suite and gives the fixture `rig: LayoutRig`, which calls `settle` afterwards.
Each test may find the engine in any layout and leave it in any. Waiting is for conditions, with deadlines on the
running loop's clock.
"""

import asyncio
import itertools
from dataclasses import dataclass
from itertools import pairwise

import pytest

from meshift.backends.layouts import LayoutChange, LayoutCommitted, LayoutProgress, LayoutRefused, ReconfigurableEngine
from meshift.schemas.layouts import CommitMode, LayoutFlags, LayoutRefusal, Split, counts_of, split_of
from tests.contract.engine_kit import POLL_S, Rig, Stream

_numbers = itertools.count(1)


@dataclass
class LayoutRig:
    """A started engine whose layout changes."""

    rig: Rig
    commit_timeout_s: float = 60.0
    tau_tokens: int = 50
    bytes_per_s: float | None = None
    """The limit that tests of slow copies use; None: as fast as it goes."""
    slow_bytes_per_s: float = 1e6
    """At which the first round of a few requests takes so long that tests act meanwhile."""
    supports_restart: bool = True

    @property
    def engine(self) -> ReconfigurableEngine:
        engine = self.rig.engine
        assert isinstance(engine, ReconfigurableEngine)
        return engine

    async def split(self) -> Split:
        """The present one."""
        return (await self.engine.layout()).layout.layer_ranges

    async def change(
        self, target: Split, *, flags: LayoutFlags | None = None, deadline_s: float = 60.0
    ) -> LayoutChange:
        """A change to it, from the present epoch, with a new id."""
        epoch = (await self.engine.layout()).layout.epoch
        return LayoutChange(f"change-{next(_numbers)}", epoch, target, flags or LayoutFlags(), deadline_s)

    async def prepare(self, change: LayoutChange, bytes_per_s: float | None = None) -> None:
        """Begin it, and start what its flags leave in."""
        await self.engine.begin_layout(change)
        if not (change.flags.no_async or change.flags.restart):
            await self.engine.load_weights(change.change_id)
        if not (change.flags.no_patch or change.flags.restart):
            await self.engine.start_kv_migration(change.change_id, bytes_per_s or self.bytes_per_s)

    async def converged(self, change: LayoutChange) -> LayoutProgress:
        """Wait until it may be committed."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.rig.timeout_s
        while True:
            progress = await self.engine.layout_progress(change.change_id)
            assert not progress.failure, progress.failure
            weights = progress.weights_loaded or change.flags.no_async or change.flags.restart
            copied = progress.lag_tokens <= self.tau_tokens or change.flags.no_patch or change.flags.restart
            if weights and copied:
                return progress
            assert loop.time() < deadline, f"{self.rig.timeout_s} s without: convergence; {progress}"
            await asyncio.sleep(POLL_S)

    async def reconfigure(
        self, target: Split, *, flags: LayoutFlags | None = None, commit: CommitMode = CommitMode.DRAIN
    ) -> LayoutCommitted:
        """All of it."""
        change = await self.change(target, flags=flags)
        await self.prepare(change)
        await self.converged(change)
        return await self.engine.commit_layout(change.change_id, commit, self.commit_timeout_s)

    async def targets(self) -> list[Split]:
        """One of each kind of change from here on, one after the other: boundaries both ways, all layers on the first
        stage and on the last one (all others without), spread again."""
        layout = (await self.engine.layout()).layout
        stages, layers, k = len(layout.layer_ranges), layout.layer_ranges[-1][1], layout.layers_per_group
        groups = -(-layers // k)
        lists = [
            [0, *([groups] * (stages - 1))],
            [stage * groups // stages for stage in range(stages)],
            [0] * stages,
            [0, *(min(groups, 1 + stage) for stage in range(stages - 1))],
            [0, *([groups - 1] * (stages - 1))],
        ]
        targets: list[Split] = []
        for starts in lists:
            bounds = [*(min(layers, start * k) for start in starts), layers]
            split = tuple(pairwise(bounds))
            if split != (targets[-1] if targets else layout.layer_ranges):
                targets.append(split)
        return targets

    async def another(self) -> Split:
        """Some layout other than the present one, by a move between neighbours if there is such a one."""
        here = await self.split()
        return await self.neighbour() or next(target for target in await self.targets() if target != here)

    async def neighbour(self) -> Split | None:
        """One group from a stage to the next, or back."""
        layout = (await self.engine.layout()).layout
        k, ranges = layout.layers_per_group, layout.layer_ranges
        starts = [start for start, _ in ranges]
        for stage in range(1, len(ranges)):
            for start in (starts[stage] - k, starts[stage] + k):
                changed = [*starts[:stage], start, *starts[stage + 1 :], ranges[-1][1]]
                if start % k == 0 and sorted(changed) == changed:
                    return tuple(pairwise(changed))
        return None

    def load_up(self, count: int = 4) -> list[Stream]:
        """Long streams."""
        requests = [self.rig.request(max_new_tokens=self.rig.long_tokens) for _ in range(count)]
        self.prompts = [request.prompt for request in requests]
        return [self.rig.submit(request) for request in requests]

    async def check_exact(self, streams: list[Stream]) -> None:
        """They are what an undisturbed run gives."""
        await self.rig.finished(*streams)
        for prompt, stream in zip(self.prompts, streams, strict=True):
            undisturbed = await self.rig.generate(self.rig.request(prompt, max_new_tokens=self.rig.long_tokens))
            assert stream.tokens == undisturbed

    async def settle(self) -> None:
        """No change is left; memory is back; nothing broke the contract."""
        now = await self.engine.layout()
        if now.change_id is not None:
            await self.engine.abort_layout(now.change_id)
        await self.rig.settle()


async def commit_or_refusal(
    rig: LayoutRig, change: LayoutChange, mode: CommitMode
) -> tuple[LayoutCommitted | None, LayoutRefusal | None]:
    """One of both."""
    try:
        return await rig.engine.commit_layout(change.change_id, mode, rig.commit_timeout_s), None
    except LayoutRefused as error:
        return None, error.refusal


MODES = [
    LayoutFlags(),
    LayoutFlags(no_patch=True),
    LayoutFlags(no_patch=True, no_async=True),
    LayoutFlags(restart=True),
]


class EngineLayoutSuite:
    """Needs the fixture `rig: LayoutRig`."""

    async def test_every_kind_of_change_under_load(self, rig: LayoutRig) -> None:
        for target in await rig.targets():
            streams = rig.load_up()
            await rig.rig.produced(streams[0], 2)
            before = await rig.engine.layout()
            done = await rig.reconfigure(target)
            assert done.now.layout.layer_ranges == target
            assert done.now.layout.epoch == before.layout.epoch + 1
            assert done.now.change_id is None
            assert done.now.capacity == before.capacity
            assert len(done.stop_ns) == len(target)
            assert all(stop >= 0 for stop in done.stop_ns)
            assert await rig.engine.layout() == done.now
            await rig.check_exact(streams)

    @pytest.mark.parametrize("flags", MODES, ids=lambda flags: ",".join(sorted(flags.model_fields_set)) or "full")
    async def test_what_is_left_out_changes_no_token(self, rig: LayoutRig, flags: LayoutFlags) -> None:
        if flags.restart and not rig.supports_restart:
            pytest.skip("this engine is restarted by others")
        streams = rig.load_up()
        await rig.rig.produced(streams[0], 2)
        target = await rig.another()
        done = await rig.reconfigure(target, flags=flags)
        assert done.now.layout.layer_ranges == target
        await rig.check_exact(streams)

    async def test_a_lag_commit_between_neighbours(self, rig: LayoutRig) -> None:
        target = await rig.neighbour()
        if target is None:
            pytest.skip("no neighbours")
        streams = rig.load_up()
        await rig.rig.produced(streams[0], 2)
        change = await rig.change(target)
        await rig.prepare(change)
        await rig.converged(change)
        done, refusal = await commit_or_refusal(rig, change, CommitMode.LAG)
        if done is None:
            # Refused before the log: the change is as it was.
            assert refusal is LayoutRefusal.UNSUPPORTED
            done, refusal = await commit_or_refusal(rig, change, CommitMode.DRAIN)
        assert done is not None, refusal
        assert done.now.layout.layer_ranges == target
        await rig.check_exact(streams)

    async def test_requests_come_and_go_at_all_times(self, rig: LayoutRig) -> None:
        change = await rig.change(await rig.another())
        streams = rig.load_up(2)
        await rig.rig.produced(streams[0], 2)
        cancelled = rig.rig.request(max_new_tokens=rig.rig.long_tokens)
        gone = rig.rig.submit(cancelled)
        await rig.prepare(change)
        prompts = [rig.rig.prompt(rig.rig.prompt_tokens * 2) for _ in range(3)]
        late = [rig.rig.submit(rig.rig.request(prompt)) for prompt in prompts]
        rig.rig.engine.cancel(cancelled.key)
        await rig.converged(change)
        commit = asyncio.ensure_future(
            rig.engine.commit_layout(change.change_id, CommitMode.DRAIN, rig.commit_timeout_s)
        )
        last = rig.rig.submit(rig.rig.request(prompts[0]))
        await commit
        await rig.rig.finished(gone, last, *late)
        assert last.tokens == late[0].tokens
        for prompt, stream in zip(prompts, late, strict=True):
            assert stream.tokens == await rig.rig.generate(rig.rig.request(prompt))
        await rig.check_exact(streams)

    async def test_an_idle_engine_changes_too(self, rig: LayoutRig) -> None:
        target = await rig.another()
        assert (await rig.reconfigure(target)).now.layout.layer_ranges == target
        assert len(await rig.rig.generate(rig.rig.request())) == rig.rig.output_tokens

    async def test_progress_is_of_those_who_get_layers(self, rig: LayoutRig) -> None:
        streams = rig.load_up(2)
        await rig.rig.produced(streams[0], 2)
        before, target = await rig.split(), await rig.another()
        change = await rig.change(target)
        await rig.engine.begin_layout(change)
        gained = {
            stage: len(set(range(*there)) - set(range(*here)))
            for stage, (here, there) in enumerate(zip(before, target, strict=True))
        }
        first = await rig.engine.layout_progress(change.change_id)
        assert {stage.stage: stage.layers for stage in first.stages} == {s: n for s, n in gained.items() if n}
        assert not first.weights_loaded
        assert first.lag_tokens > 0
        await rig.engine.load_weights(change.change_id)
        await rig.engine.start_kv_migration(change.change_id, rig.bytes_per_s)
        last = await rig.converged(change)
        assert last.scheduled_tokens >= first.scheduled_tokens
        assert all(stage.byte_count > 0 and stage.rounds >= 1 for stage in last.stages)
        await rig.engine.abort_layout(change.change_id)

    # ---- refusals

    async def test_what_is_no_target(self, rig: LayoutRig) -> None:
        layout = (await rig.engine.layout()).layout
        ranges, layers, k = layout.layer_ranges, layout.layer_ranges[-1][1], layout.layers_per_group
        more: Split = (*ranges, (layers, layers))
        cases = [(ranges, LayoutRefusal.UNCHANGED), (more, LayoutRefusal.INVALID)]
        cases.append((split_of((layers + k, *([0] * (len(ranges) - 1)))), LayoutRefusal.INVALID))
        if k > 1 and len(ranges) > 1:
            cases.append((split_of((1, layers - 1, *([0] * (len(ranges) - 2)))), LayoutRefusal.UNALIGNED))
        for target, refusal in cases:
            with pytest.raises(LayoutRefused) as caught:
                await rig.engine.begin_layout(await rig.change(target))
            assert caught.value.refusal is refusal, counts_of(target)
        assert (await rig.engine.layout()).change_id is None

    async def test_one_change_at_a_time(self, rig: LayoutRig) -> None:
        target = await rig.another()
        first, second = await rig.change(target), await rig.change(target)
        await rig.engine.begin_layout(first)
        await rig.engine.begin_layout(first)
        with pytest.raises(LayoutRefused) as caught:
            await rig.engine.begin_layout(second)
        assert caught.value.refusal is LayoutRefusal.BUSY
        await rig.engine.abort_layout(first.change_id)
        await rig.engine.begin_layout(second)
        await rig.engine.abort_layout(second.change_id)

    async def test_a_plan_for_another_epoch_is_refused(self, rig: LayoutRig) -> None:
        back = await rig.split()
        stale = await rig.change(await rig.another())
        await rig.reconfigure(stale.target)
        with pytest.raises(LayoutRefused) as caught:
            await rig.engine.begin_layout(LayoutChange("late", stale.epoch, back))
        assert caught.value.refusal is LayoutRefusal.STALE

    async def test_no_commit_before_the_weights_are_there(self, rig: LayoutRig) -> None:
        streams = rig.load_up(2)
        change = await rig.change(await rig.another())
        await rig.engine.begin_layout(change)
        with pytest.raises(LayoutRefused) as caught:
            await rig.engine.commit_layout(change.change_id, CommitMode.DRAIN, rig.commit_timeout_s)
        assert caught.value.refusal is LayoutRefusal.NOT_READY
        await rig.prepare(change)
        await rig.converged(change)
        await rig.engine.commit_layout(change.change_id, CommitMode.DRAIN, rig.commit_timeout_s)
        await rig.check_exact(streams)

    # ---- ends without a commit

    async def test_an_abort_leaves_no_trace(self, rig: LayoutRig) -> None:
        streams = rig.load_up()
        await rig.rig.produced(streams[0], 2)
        before = await rig.engine.layout()
        for step in ("begun", "copying", "converged"):
            change = await rig.change(await rig.another())
            await rig.engine.begin_layout(change)
            if step != "begun":
                await rig.prepare(change)
            if step == "converged":
                await rig.converged(change)
            await rig.engine.abort_layout(change.change_id)
            await rig.engine.abort_layout(change.change_id)
            now = await rig.engine.layout()
            assert now.layout == before.layout
            assert now.change_id is None
            assert now.capacity == before.capacity
            assert not next(end for end in now.ended if end.change_id == change.change_id).committed
            for call in (rig.engine.begin_layout(change), rig.engine.layout_progress(change.change_id)):
                with pytest.raises(LayoutRefused) as caught:
                    await call
                assert caught.value.refusal is LayoutRefusal.UNKNOWN
        await rig.check_exact(streams)

    async def test_an_abort_after_the_commit_is_too_late(self, rig: LayoutRig) -> None:
        target = await rig.another()
        change = await rig.change(target)
        await rig.prepare(change)
        await rig.converged(change)
        await rig.engine.commit_layout(change.change_id, CommitMode.DRAIN, rig.commit_timeout_s)
        await rig.engine.abort_layout(change.change_id)
        now = await rig.engine.layout()
        assert now.layout.layer_ranges == target
        assert next(end for end in now.ended if end.change_id == change.change_id).committed

    async def test_an_abort_of_what_never_began_refuses_it(self, rig: LayoutRig) -> None:
        change = await rig.change(await rig.another())
        await rig.engine.abort_layout(change.change_id)
        with pytest.raises(LayoutRefused) as caught:
            await rig.engine.begin_layout(change)
        assert caught.value.refusal is LayoutRefusal.UNKNOWN

    async def test_its_deadline_ends_it(self, rig: LayoutRig) -> None:
        streams = rig.load_up(2)
        before = await rig.split()
        change = await rig.change(await rig.another(), deadline_s=0.3)
        await rig.prepare(change, rig.slow_bytes_per_s)

        loop = asyncio.get_running_loop()
        deadline = loop.time() + rig.rig.timeout_s
        while (now := await rig.engine.layout()).change_id is not None:
            assert loop.time() < deadline, "its deadline didn't end it"
            await asyncio.sleep(POLL_S)
        end = next(end for end in now.ended if end.change_id == change.change_id)
        assert (end.committed, end.refusal) == (False, LayoutRefusal.DEADLINE)
        assert now.layout.layer_ranges == before
        await rig.check_exact(streams)

    async def test_capacity_does_not_grow_meanwhile(self, rig: LayoutRig) -> None:
        before = await rig.engine.layout()
        change = await rig.change(await rig.another())
        shrunk = await rig.engine.resize_kv(before.capacity - 2 * before.page_tokens)
        await rig.engine.begin_layout(change)
        held = await rig.engine.resize_kv(before.capacity)
        assert held.capacity == shrunk.capacity
        assert held.reason
        await rig.engine.abort_layout(change.change_id)
        assert (await rig.engine.resize_kv(before.capacity)).capacity == before.capacity

    async def test_there_and_back_many_times(self, rig: LayoutRig) -> None:
        home = await rig.split()
        away = await rig.another()
        streams = rig.load_up(3)
        for turn in range(8):
            await rig.reconfigure(away if turn % 2 == 0 else home)
        assert await rig.split() == home
        await rig.check_exact(streams)
