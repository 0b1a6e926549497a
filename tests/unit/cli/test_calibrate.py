"""`meshift calibrate` as a command, and who takes its file."""

import json
from pathlib import Path

import pytest

from meshift.backends.sim.parameters import SimParameters
from meshift.services.calibration.file import Calibration, FitQuality, load_calibration, write_calibration
from meshift.services.calibration.growth import StepGrowth
from meshift.services.calibration.reading import CalibrationFileError
from meshift.services.cli import calibrate, simulate, up
from meshift.services.cli.errors import CommandError
from meshift.services.cli.settings import parse_settings
from meshift.services.cli.simulate import SimulateSettings
from meshift.services.process import EXIT_FAILED
from meshift.services.scheduler import main as scheduler
from meshift.services.scheduler.main import SchedulerSettings
from meshift.services.scheduler.policy.settings import HeadroomSettings
from meshift.services.worker.engines import build_engine
from meshift.services.worker.main import WorkerSettings, calibrated
from meshift.services.worker.policy.virtual_usage import PriorityClass, VirtualUsageSettings

CLASSES = VirtualUsageSettings(
    classes=(PriorityClass(name="high", execution=1, target_load=777), PriorityClass(name="normal", execution=0))
)
MEASURED = Calibration(
    model="smollm2",
    engine="sglang",
    capacity=4096,
    request_tokens=256,
    percentile=50.0,
    parameters=SimParameters(capacity=4096, page_size=1, decode_step_ns=11_000_000),
    virtual_usage=CLASSES,
    limits_ms={"high": 30.0},
    loads=((256, 25.0), (512, 28.0)),
    quality=FitQuality(decode_error_p50=0.01, decode_error_max=0.02, prefill_error_p50=0.0, prefill_error_max=0.1),
    step_growth=StepGrowth(full_step_times=4.5, request_tokens=2800.0),
)
OLDER = MEASURED.model_copy(update={"step_growth": None})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.json"
    write_calibration(path, MEASURED)
    return path


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--target", "high=quick"], "--target: 'high=quick' is no target"),
        (["--target", "high=1.2x,high:2=1.3x"], "two targets have the name high"),
        (["--out", "/no/such/folder/file.json"], "no file can be written there"),
        (["--request-tokens", "3"], "--request-tokens"),
        (["--percentile", "100"], "--percentile"),
        (["--model", "/no/such/model"], "no model"),
        (["--instance", "worker-1", "--nats", "nats://127.0.0.1:1"], "no mesh answers"),
    ],
)
def test_what_can_not_be_measured_is_one_line(arguments: list[str], says: str, tmp_path: Path) -> None:
    rest = [] if "--out" in arguments else ["--out", str(tmp_path / "c.json")]
    with pytest.raises(CommandError, match=says):
        calibrate.main("calibrate", [*arguments, *rest])


def test_the_table_says_what_was_found() -> None:
    told = calibrate.report(MEASURED)
    assert "smollm2, sglang, 4096 tokens" in told
    assert "11 + 0.35 * requests + 0.0022 * tokens" in told
    assert "777 tokens" in told
    assert "4.5 times as long at full memory; a request weighs 2800 tokens" in told
    assert "grows" not in calibrate.report(OLDER)
    unlimited = CLASSES.model_copy(update={"classes": (PriorityClass(name="high", execution=1), CLASSES.classes[1])})
    told = calibrate.report(MEASURED.model_copy(update={"virtual_usage": unlimited}))
    assert "none: held up to 512 tokens" in told
    assert "none: no target" in told


def test_the_file_is_read_as_it_was_written(file: Path) -> None:
    assert load_calibration(file) == MEASURED
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    ("content", "says"),
    [("", "no calibration"), ("{}", "Field required"), ('{"version": 2}', "version"), ("[1]", "no calibration")],
)
def test_what_is_no_calibration_is_said(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(CalibrationFileError, match=says):
        load_calibration(path)
    with pytest.raises(CalibrationFileError, match="No such file"):
        load_calibration(tmp_path / "missing.json")


def test_workers_take_the_classes_unless_others_are_set(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = parse_settings(WorkerSettings, "worker", ["--calibration", str(file)])
    assert calibrated(plain).virtual_usage == CLASSES
    assert not caplog.records
    own = '[{"name": "all", "execution": 0}]'
    chosen = parse_settings(WorkerSettings, "worker", ["--calibration", str(file), "--virtual-usage.classes", own])
    assert [item.name for item in calibrated(chosen).virtual_usage.classes] == ["all"]
    other = parse_settings(WorkerSettings, "worker", ["--calibration", str(file), "--model", "llama"])
    assert calibrated(other).virtual_usage == CLASSES
    assert "was measured with smollm2, and this is llama" in caplog.text
    for none in ([], ["--calibration", ""]):
        plain = parse_settings(WorkerSettings, "worker", none)
        assert calibrated(plain).virtual_usage == VirtualUsageSettings()


def test_the_scheduler_takes_what_headroom_costs_unless_it_is_set(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    def headroom(*words: str) -> HeadroomSettings:
        return scheduler.calibrated(parse_settings(SchedulerSettings, "scheduler", list(words))).scheduling.headroom

    measured = headroom("--calibration", str(file))
    assert (measured.full_step_times, measured.request_tokens) == (4.5, 2800.0)
    assert measured.others_slower_max == HeadroomSettings().others_slower_max
    chosen = headroom("--calibration", str(file), "--scheduling.headroom.full-step-times", "3")
    assert (chosen.full_step_times, chosen.request_tokens) == (3.0, 2800.0)
    assert headroom() == headroom("--calibration", "") == HeadroomSettings()
    assert not caplog.records
    write_calibration(file, OLDER)
    assert headroom("--calibration", str(file)) == HeadroomSettings()
    assert "calibrate again" in caplog.text


async def test_a_scheduler_says_why_it_can_not_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = parse_settings(SchedulerSettings, "scheduler", ["--calibration", str(tmp_path / "missing.json")])
    assert await scheduler.run(settings) == EXIT_FAILED
    assert "scheduler can't start" in caplog.text
    assert "No such file" in caplog.text


def test_up_gives_the_file_to_workers_and_scheduler(file: Path) -> None:
    settings = parse_settings(up.UpSettings, "up", ["--calibration", str(file)])
    assert up.calibration_settings(settings) == {"calibration": str(file)}
    assert up.calibration_settings(parse_settings(up.UpSettings, "up", [])) == {}


def test_a_simulated_worker_is_as_fast_as_what_was_measured(file: Path) -> None:
    settings = parse_settings(WorkerSettings, "worker", ["--calibration", str(file), "--capacity-tokens", "2000"])
    parameters = build_engine("sim", settings).parameters  # type: ignore[attr-defined]
    assert (parameters.decode_step_ns, parameters.page_size, parameters.capacity) == (11_000_000, 1, 2000)


def test_up_refuses_a_file_that_workers_would_die_of(file: Path, tmp_path: Path) -> None:
    up.check_calibration(parse_settings(up.UpSettings, "up", ["--calibration", str(file)]))
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    with pytest.raises(CommandError, match=r"--calibration: .*no calibration"):
        up.main("up", ["--calibration", str(broken), "--state-dir", str(tmp_path)])


def test_a_simulation_takes_engine_and_classes_and_flags_win(file: Path, tmp_path: Path) -> None:
    chosen = parse_settings(SimulateSettings, "simulate", ["--calibration", str(file), "--engine.capacity", "999"])
    settings = simulate.calibrated(chosen)
    assert (settings.engine.capacity, settings.engine.decode_step_ns) == (999, 11_000_000)
    assert settings.usage == CLASSES
    assert settings.scheduling.headroom.full_step_times == 4.5
    assert settings.parameters_hash() != parse_settings(SimulateSettings, "simulate", []).parameters_hash()
    told = tmp_path / "told.json"
    words = ["--trace", "S-S", "--rate", "1", "--requests", "5", "--instances", "1", "--quiet", "--json", str(told)]
    assert simulate.main("simulate", [*words, "--calibration", str(file)]) == 0
    measured = json.loads(told.read_text())["policies"]["meshift"]["decode_ms"]["p50"]
    assert simulate.main("simulate", [*words, "--calibration", str(file), "--engine.decode-step-ns", "99000000"]) == 0
    slower = json.loads(told.read_text())["policies"]["meshift"]["decode_ms"]["p50"]
    assert slower > measured + 80
    with pytest.raises(CommandError, match="No such file"):
        simulate.main("simulate", [*words, "--calibration", str(tmp_path / "missing.json")])
