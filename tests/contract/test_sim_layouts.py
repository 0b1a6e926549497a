"""The simulated engine passes the suite of layouts; and what a layer move does that leaves something out is seen."""

import random
from collections.abc import AsyncIterator

import pytest

from meshift.backends.sim import SimEngine, SimParameters
from meshift.backends.sim.layer_copies import LayerCopy, Patch
from meshift.backends.sim.pipeline import SimPipeline, SimStage
from meshift.schemas.layouts import CommitMode, LayoutFlags, LayoutRefusal, split_of
from meshift.services.simulation.virtual_time import VirtualTimeLoop
from tests.contract.engine_layout_suite import EngineLayoutSuite, LayoutRig
from tests.contract.test_sim_engine import MODES, REAL_SPEED, start_rig
from tests.support.socket_loop import SocketLoop

PIPELINES = [
    SimPipeline.even(1, 32),
    SimPipeline.even(2, 32),
    SimPipeline.even(3, 32, 5),
    SimPipeline.even(4, 32, 1),
]


async def layout_rig(engine: SimEngine, timeout_s: float = 600.0) -> LayoutRig:
    return LayoutRig(await start_rig(engine, timeout_s))


CASES = list(zip(PIPELINES[1:], MODES, strict=True))
"""Each way to step with one pipeline: that they are equal is a test of its own."""


class TestLayouts(EngineLayoutSuite):
    loop_factory = VirtualTimeLoop

    @pytest.fixture(params=CASES, ids=["single-2x4", "skip-3x5", "edges-4x1"])
    async def rig(self, request: pytest.FixtureRequest) -> AsyncIterator[LayoutRig]:
        pipeline, (skip, emit) = request.param
        rig = await layout_rig(SimEngine(pipeline=pipeline, skip_steps=skip, emit=emit))
        yield rig
        await rig.settle()
        await rig.engine.stop(1.0)


class TestLayoutsInSeconds(EngineLayoutSuite):
    """On a clock that doesn't count nanoseconds, as real ones are."""

    loop_factory = SocketLoop

    @pytest.fixture
    async def rig(self) -> AsyncIterator[LayoutRig]:
        pipeline = SimPipeline.even(2, 32).model_copy(update={"load_bytes_per_s": 10**12, "copy_bytes_per_s": 10**12})
        rig = await layout_rig(SimEngine(SimParameters().faster(5 * REAL_SPEED), pipeline=pipeline), timeout_s=20.0)
        yield rig
        await rig.settle()
        await rig.engine.stop(1.0)


class TestSimOnly:
    loop_factory = VirtualTimeLoop

    @pytest.fixture
    async def rig(self) -> AsyncIterator[LayoutRig]:
        rig = await layout_rig(SimEngine(pipeline=PIPELINES[1]))
        yield rig
        await rig.settle()
        await rig.engine.stop(1.0)

    async def test_a_slot_that_is_left_out_changes_tokens(
        self, rig: LayoutRig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Exactness is checked: without the last patch, streams differ."""
        streams = rig.load_up()
        await rig.rig.produced(streams[0], 2)
        change = await rig.change(await rig.another())
        await rig.prepare(change)
        await rig.converged(change)
        monkeypatch.setattr(LayerCopy, "drain", lambda copy: Patch([], 0, copy.applied))
        await rig.engine.commit_layout(change.change_id, CommitMode.DRAIN, 60.0)
        with pytest.raises(AssertionError):
            await rig.check_exact(streams)

    async def test_the_stop_is_the_last_patch_alone(self, rig: LayoutRig) -> None:
        """Against: all KV; all KV and weights; all of it anew."""
        stops = []
        for flags in (
            LayoutFlags(),
            LayoutFlags(no_patch=True),
            LayoutFlags(no_patch=True, no_async=True),
            LayoutFlags(restart=True),
        ):
            streams = rig.load_up()
            await rig.rig.produced(streams[0], 100)
            done = await rig.reconfigure(await rig.another(), flags=flags)
            stops.append(max(done.stop_ns) / 1e6)
            await rig.check_exact(streams)
        assert stops == sorted(stops)
        assert stops[1] > 5 * stops[0]

    async def test_memory_is_checked_by_the_engine_too(self) -> None:
        """Whoever plans wrong is refused, and nothing has changed."""
        parameters = SimParameters(capacity=1600)
        pipeline = SimPipeline.even(2, 32)
        block = pipeline.block_bytes(parameters)
        budget = 16 * pipeline.layer_weight_bytes + 4 * 100 * block
        stages = (SimStage(memory_bytes=budget), SimStage(memory_bytes=budget))
        tight = await layout_rig(SimEngine(parameters, pipeline=pipeline.model_copy(update={"stages": stages})))
        change = await tight.change(split_of((20, 12)))
        await tight.engine.begin_layout(change)
        for call in (
            tight.engine.load_weights(change.change_id),
            tight.engine.start_kv_migration(change.change_id, None),
        ):
            with pytest.raises(Exception, match="stage 0 needs") as caught:
                await call
            assert getattr(caught.value, "refusal", None) is LayoutRefusal.NO_MEMORY
        await tight.settle()
        await tight.engine.stop(1.0)

    async def test_what_breaks_on_the_way_can_only_be_undone(self, rig: LayoutRig) -> None:
        assert isinstance(rig.engine, SimEngine)
        streams = rig.load_up(2)
        change = await rig.change(await rig.another())
        await rig.prepare(change)
        rig.engine.break_layout("a rank lost its disk")
        assert (await rig.engine.layout_progress(change.change_id)).failure == "a rank lost its disk"
        with pytest.raises(Exception, match="lost its disk"):
            await rig.engine.commit_layout(change.change_id, CommitMode.DRAIN, 60.0)
        await rig.engine.abort_layout(change.change_id)
        await rig.check_exact(streams)

    async def test_a_hung_engine_does_not_commit_by_the_deadline(self) -> None:
        rig = await layout_rig(SimEngine(pipeline=PIPELINES[1]))
        assert isinstance(rig.engine, SimEngine)
        change = await rig.change(await rig.another())
        await rig.prepare(change)
        await rig.converged(change)
        rig.engine.hang()
        with pytest.raises(TimeoutError):
            await rig.engine.commit_layout(change.change_id, CommitMode.DRAIN, 5.0)
        await rig.engine.stop(1.0)

    @pytest.mark.parametrize("seed", range(6))
    async def test_random_changes_in_skipped_and_single_steps_are_the_same(self, seed: int) -> None:
        """Skipping changes neither time nor token, whatever changes meanwhile."""
        print(f"seed {seed}")
        courses = []
        for skip in (False, True):
            rng = random.Random(seed)
            rig = await layout_rig(SimEngine(SimParameters(capacity=1000), pipeline=PIPELINES[2], skip_steps=skip))
            rig.rig.random = random.Random(seed)
            streams = rig.load_up(5)
            targets = await rig.targets()
            stops = []
            for target in rng.sample(targets, len(targets)):
                if target != await rig.split():
                    stops.append((await rig.reconfigure(target)).stop_ns)
            await rig.rig.finished(*streams)
            courses.append((stops, [stream.tokens for stream in streams]))
            await rig.settle()
            await rig.engine.stop(1.0)
        assert courses[0] == courses[1]
