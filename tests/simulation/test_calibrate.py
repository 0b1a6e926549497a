"""A calibration of simulated instances, in virtual time: what is measured is what they were given."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from meshift.backends.sim.parameters import SimParameters
from meshift.schemas.errors import PeerGone
from meshift.services.calibration.file import Calibration
from meshift.services.calibration.plan import PlanError
from meshift.services.calibration.probe import InstanceProbe, ProbeError
from meshift.services.calibration.record import Record, RecordError
from meshift.services.calibration.targets import parse_target
from meshift.services.cli.calibrate import CalibrateSettings, calibrate
from meshift.services.simulation.mesh import SimulatedMesh
from tests.support.mesh_kit import outsider, play, read, request

PARAMETERS = SimParameters(capacity=8000, decode_token_ns=9_000, prefill_token_squared_ns=40)
BUS_NS = 1_000_000
"""What the bus adds to a prefill, at most."""

Scenario = Callable[[SimulatedMesh, CalibrateSettings], Awaitable[None]]


def settings(folder: Path, **changes: object) -> CalibrateSettings:
    return CalibrateSettings.model_validate({"out": folder / "c.json", "quick": True, "stall_s": 30.0} | changes)


async def calibrated(mesh: SimulatedMesh, chosen: CalibrateSettings, *targets: str) -> Calibration:
    bus = await outsider(mesh)
    try:
        return await calibrate(bus, "worker-0", chosen, [parse_target(target) for target in targets or ("high=1.2x",)])
    finally:
        await bus.close()


def run(scenario: Callable[[SimulatedMesh], Awaitable[None]], instances: int = 1) -> None:
    play(scenario, instances=instances, parameters=PARAMETERS)


def test_it_finds_the_parameters_of_the_engine(tmp_path: Path) -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        found = (await calibrated(mesh, settings(tmp_path, quick=False))).parameters
        for name in ("decode_step_ns", "decode_request_ns", "decode_token_ns"):
            assert getattr(found, name) == pytest.approx(getattr(PARAMETERS, name), rel=1e-3), name
        for name in ("prefill_token_ns", "prefill_token_squared_ns"):
            assert getattr(found, name) == pytest.approx(getattr(PARAMETERS, name), rel=0.02), name
        assert 0 < found.prefill_batch_ns - PARAMETERS.prefill_batch_ns < BUS_NS
        assert (found.capacity, found.page_size) == (8000, 16)

    run(scenario)


def test_the_target_load_is_where_steps_take_as_long_as_they_may(tmp_path: Path) -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        found = await calibrated(mesh, settings(tmp_path), "high=1.5x", "gold:2=33ms")
        gold, high, normal = found.virtual_usage.classes
        assert normal.target_load is None
        cost = PARAMETERS.step_cost(copying=False)
        for item in (gold, high):
            assert item.target_load is not None
            requests = item.target_load / (found.request_tokens + 10)
            step_ms = (cost.base + cost.request * requests + cost.token * item.target_load) / 1e6
            assert step_ms == pytest.approx(found.limits_ms[item.name], rel=0.02)
        assert gold.target_load is not None
        assert high.target_load is not None
        assert gold.target_load < high.target_load

    run(scenario)


def test_one_that_was_broken_off_goes_on_and_finds_the_same(tmp_path: Path) -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        chosen = settings(tmp_path)
        whole = await calibrated(mesh, chosen)
        raw = Record.path_of(chosen.out)
        lines = raw.read_text().splitlines(keepends=True)
        raw.write_text("".join(lines[:5]) + lines[5][:20])
        before = mesh.workers["worker-0"].engine.load().prefill_tokens
        again = await calibrated(mesh, settings(tmp_path, resume=True))
        computed = mesh.workers["worker-0"].engine.load().prefill_tokens - before
        assert again.virtual_usage == whole.virtual_usage
        assert again.parameters.decode_token_ns == pytest.approx(whole.parameters.decode_token_ns, rel=1e-6)
        kept = raw.read_text().splitlines(keepends=True)
        assert kept[:5] == lines[:5]
        assert [json.loads(line)["cell"] for line in kept[5:]] == [json.loads(line)["cell"] for line in lines[5:]]
        skipped = sum(json.loads(line)["requests"] * json.loads(line)["prompt_tokens"] for line in lines[1:5])
        assert computed + skipped == before, "what had been measured was measured again"
        with pytest.raises(RecordError, match="request_tokens 256 there, 128 here"):
            await calibrated(mesh, settings(tmp_path, resume=True, request_tokens=128))
        raw.write_text("nonsense\n")
        with pytest.raises(RecordError, match="holds no measurements"):
            await calibrated(mesh, settings(tmp_path, resume=True))

    run(scenario)


def test_an_instance_that_serves_others_is_not_measured(tmp_path: Path) -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        other = asyncio.get_running_loop().create_task(read(mesh.frontends["frontend-0"], request("long", 50, 4000)))
        await asyncio.sleep(1.0)
        with pytest.raises(ProbeError, match="worker-0 serves other requests"):
            await calibrated(mesh, settings(tmp_path))
        assert (await other)[-1].finish is not None

    run(scenario)


def test_an_instance_that_dies_meanwhile_is_said(tmp_path: Path) -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        running = asyncio.get_running_loop().create_task(calibrated(mesh, settings(tmp_path)))
        await asyncio.sleep(5.0)
        await mesh.kill_worker("worker-0")
        with pytest.raises(ProbeError, match=r"gave no token for 30 s|takes no request|started again"):
            await running

    run(scenario)


def test_a_request_that_moves_away_is_said(tmp_path: Path) -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        running = asyncio.get_running_loop().create_task(calibrated(mesh, settings(tmp_path)))
        await asyncio.sleep(5.0)
        mesh.retire("worker-0", 60.0)
        with pytest.raises(ProbeError, match=r"moved away|takes no request|cancelled"):
            await running

    run(scenario, instances=2)


def test_who_is_not_there_or_too_small_is_said(tmp_path: Path) -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        bus = await outsider(mesh)
        with pytest.raises(PeerGone):
            await calibrate(bus, "nobody", settings(tmp_path), [parse_target("high=1.2x")])
        await bus.close()
        with pytest.raises(PlanError, match="--request-tokens takes shorter ones"):
            await calibrated(mesh, settings(tmp_path, request_tokens=7000))

    run(scenario)


def test_nothing_is_left_running_when_it_is_broken_off(tmp_path: Path) -> None:
    async def scenario(mesh: SimulatedMesh) -> None:
        running = asyncio.get_running_loop().create_task(calibrated(mesh, settings(tmp_path)))
        engine = mesh.workers["worker-0"].engine
        while not engine.load().running:
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await asyncio.sleep(2.0)
        assert (engine.load().running, engine.load().waiting, engine.load().used) == (0, 0, 0)

    run(scenario)


def test_lost_tokens_are_said(tmp_path: Path) -> None:
    """A probe is no frontend: it asks for nothing again."""

    async def scenario(mesh: SimulatedMesh) -> None:
        seen: list[InstanceProbe] = []
        take = InstanceProbe._take

        def lossy(probe: InstanceProbe, *args: object) -> None:
            if not seen and args[3] == 3:
                seen.append(probe)
                return
            take(probe, *args)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(InstanceProbe, "_take", lossy)
            with pytest.raises(ProbeError, match="tokens were lost"):
                await calibrated(mesh, settings(tmp_path))

    run(scenario)
