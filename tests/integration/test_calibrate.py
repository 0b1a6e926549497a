"""`meshift calibrate` as a user runs it: it starts an instance, measures it, and ends it."""

import os
from pathlib import Path

import pytest

from meshift.services.calibration.file import load_calibration
from meshift.services.calibration.record import Record
from meshift.services.cli.model import SMALL_MODEL
from meshift.services.cli.paths import models_folder
from tests.support.processes import run_meshift

pytestmark = [pytest.mark.nats, pytest.mark.slow, pytest.mark.timeout(180)]

DEADLINE_S = 120.0


async def calibrate(*arguments: str) -> tuple[int, str]:
    """Its exit status and output."""
    environment = {**os.environ, "MESHIFT_SIM_SPEED": "10", "MESHIFT_CAPACITY_TOKENS": "3200"}
    return await run_meshift("calibrate", *arguments, deadline_s=DEADLINE_S, environment=environment)


async def test_a_simulated_instance_is_started_measured_and_ended(tmp_path: Path) -> None:
    folder = models_folder() / SMALL_MODEL
    if not (folder / "config.json").exists():
        pytest.skip("the small model isn't prepared: `meshift model prepare smollm2`")
    out = tmp_path / "mine.json"
    words = ("--engine", "sim", "--model", str(folder), "--out", str(out), "--target", "high=1000ms", "--quick")
    status, text = await calibrate(*words)
    assert status == 0, text
    assert f"written to {out}" in text
    found = load_calibration(out)
    assert (found.model, found.engine, found.capacity) == (SMALL_MODEL, "sim", 3200)
    high, normal = found.virtual_usage.classes
    assert (high.target_load, normal.target_load) == (None, None), "no load takes a second a token"
    raw = Record.path_of(out)
    measured = raw.read_text()
    status, text = await calibrate(*words[:-2], "high=0.001ms", "--quick", "--resume")
    assert status == 1, text
    assert "high: 0.001 ms a token can't be met" in text
    assert raw.read_text() == measured, "nothing was to be measured again"
    assert load_calibration(out) == found
