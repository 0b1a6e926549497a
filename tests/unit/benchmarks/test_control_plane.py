"""The benchmark of the scheduler over real NATS, small: that it asks, is answered, and counts."""

import pytest

from meshift.benchmarks.experiments import control_plane
from meshift.benchmarks.experiments.control_plane import CAPACITY, _central_command, _control_plane

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_plane, "WARM_S", 0.3)
    # All questions are answered before this is over, also on a busy machine; waiting ends when they are.
    monkeypatch.setattr(control_plane, "SETTLE_S", 30.0)


async def test_the_scheduler_answers_while_instances_report() -> None:
    async with _control_plane(control_plane._scheduler_command) as (client, pid):
        row = await control_plane.ask_global(client, pid, instances=5, rate=40, seconds=0.5)
    assert row["answered_share"] + row["refused"] / 20 == pytest.approx(1.0, abs=0.1)
    assert row["answered_share"] > 0
    assert 0 < row["dispatch_ms_p50"] <= row["dispatch_ms_p99"]


async def test_the_centralized_one_is_asked_at_every_step() -> None:
    async with _control_plane(lambda url: _central_command(url, 3)) as (client, pid):
        row = await control_plane.ask_central(client, pid, instances=3, rate=20, seconds=0.5)
    assert row["answered_share"] == pytest.approx(1.0)
    assert row["refused"] == 0
    assert 0 < row["stall_ms_p50"] <= row["stall_ms_p99"]
    assert row["steps_a_second"] > 0


def test_a_report_is_valid_whatever_its_sequence() -> None:
    from random import Random

    from meshift.schemas.instances import LoadReport

    before, after = control_plane._report_parts(Random(1), 7)
    report = LoadReport.model_validate_json(before + b"42" + after)
    assert (report.owner.instance_id, report.sequence, report.capacity) == ("i0007", 42, CAPACITY)


def test_nothing_answered_is_no_figure() -> None:
    assert control_plane.latency("x", []) == {"x_ms_p50": None, "x_ms_p99": None}
