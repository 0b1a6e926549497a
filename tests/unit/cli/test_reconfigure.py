"""`meshift reconfigure`, against the real HTTP shell over a scripted coordinator."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from meshift.schemas.errors import InvalidRequest, LayoutDeclined, NotFound
from meshift.schemas.layouts import CommitMode, LayoutFlags
from meshift.schemas.reconfiguring import ReconfigureBody, ReconfigureOutcome
from meshift.services.cli import reconfigure
from meshift.services.cli.errors import CommandError
from meshift.services.frontend.http import make_access
from meshift.services.frontend.text.tokenizer import ChatTokenizer
from tests.unit.frontend.fake_frontend import reconfigure_report
from tests.unit.frontend.http.harness import Shell, make_shell
from tests.unit.frontend.text.tiny_model import write_tiny_model
from tests.unit.schemas.samples import CHANGE, PLAN

ACCESS: dict[str, Any] = {"url": "http://mesh", "admin_key": "sk-admin", "instance": "worker-1"}
DONE = CHANGE.model_copy(update={"stop_ns": (1_500_000, 250_000), "refusal": None})


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    folder = write_tiny_model(tmp_path / "tiny")
    access = make_access(["sk-client"], ["sk-admin"], insecure_no_keys=False)
    return make_shell(folder, ChatTokenizer.load(folder), access=access)


async def run(shell: Shell, **settings: Any) -> tuple[Any, list[str]]:
    chosen = reconfigure.ReconfigureSettings.model_validate(ACCESS | {"layers": "20,10"} | settings)
    lines: list[str] = []
    return await reconfigure.run(chosen, httpx.ASGITransport(app=shell.app), lines.append), lines


async def test_it_is_watched_to_its_end(shell: Shell) -> None:
    fake = shell.frontend.reconfiguring
    fake.ended = [reconfigure_report(ReconfigureOutcome.COMMITTED, change=DONE, epoch=3, duration_s=2.5)]
    report, lines = await run(shell, commit="lag", no_patch=True, tau_tokens=9)
    body = ReconfigureBody(
        layers=(20, 10), commit=CommitMode.LAG, flags=LayoutFlags(no_patch=True), tau_tokens=9, deadline_s=120.0
    )
    assert fake.asked == [("worker-1", body)]
    assert [line.split()[-3:] for line in lines] == [["converging,", "0.0", "s"], ["behind,", "2.5", "s"]]
    assert lines[-1].startswith(f"[{'#' * reconfigure.BAR_CHARS}] 100% committed")
    told = reconfigure.describe(report)
    assert "16/14 layers, epoch 3, in 2.50 s; stages held back for 1.50, 0.25 ms (lag)" in told


async def test_a_dry_run_tells_the_plan(shell: Shell) -> None:
    shell.frontend.reconfiguring.report = reconfigure_report(ReconfigureOutcome.PLANNED, plan=PLAN)
    report, lines = await run(shell, dry_run=True)
    assert lines == []
    assert reconfigure.describe(report) == "a plan"
    assert shell.frontend.reconfiguring.asked[0][1].dry_run


async def test_a_cancel(shell: Shell) -> None:
    shell.frontend.reconfiguring.ended = [reconfigure_report(ReconfigureOutcome.ABORTED, reason="an operator")]
    report, _ = await run(shell, cancel=True, layers="")
    assert shell.frontend.reconfiguring.cancelled == ["worker-1"]
    assert "worker-1: aborted: an operator" in reconfigure.describe(report)
    assert report.outcome in reconfigure.FAILED


async def test_without_waiting(shell: Shell) -> None:
    report, lines = await run(shell, wait=False)
    assert (report.outcome, lines) == (None, [])
    assert "coordinator-1-1 is converging" in reconfigure.describe(report)


@pytest.mark.parametrize("layers", ["", "a,b", "20,", "20,-1", "1.5,2"])
async def test_layers_that_are_no_list(shell: Shell, layers: str) -> None:
    with pytest.raises(CommandError, match="a number for each stage"):
        await run(shell, layers=layers)
    assert shell.frontend.reconfiguring.asked == []


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NotFound("there is no instance 'worker-1'"), "meshift status"),
        (InvalidRequest("layers: near 16/14", param="layers"), "near 16/14"),
        (LayoutDeclined("it keeps its layout", refusal="no_memory"), "keeps its layout"),
    ],
)
async def test_refusals_are_told(shell: Shell, error: Any, words: str) -> None:
    shell.frontend.reconfiguring.error = error
    with pytest.raises(CommandError, match=words):
        await run(shell)


def test_the_bar_grows() -> None:
    shares = []
    for loaded, rounds in ((0, 0), (2, 0), (4, 0), (4, 1)):
        stage = CHANGE.stages[0].model_copy(update={"layers_loaded": loaded, "rounds": rounds})
        report = reconfigure_report(change=CHANGE.model_copy(update={"stages": (stage,)}))
        shares.append(reconfigure.share_of(report))
    assert shares == sorted(set(shares))
    assert 0 < shares[0] < shares[-1] < 1
