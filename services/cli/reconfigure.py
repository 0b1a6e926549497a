"""`meshift reconfigure`: give the stages of an instance other layers while it serves, and watch how it goes."""

import asyncio
import sys
from collections.abc import Callable

import httpx
from pydantic import Field
from pydantic_settings import CliPositionalArg

from meshift.client.mesh import MeshClient
from meshift.schemas.errors import NotFound
from meshift.schemas.layouts import CommitMode, LayoutFlags, counts_of
from meshift.schemas.reconfiguring import ReconfigureBody, ReconfigureOutcome, ReconfigureReport
from meshift.services.cli.admin import admin_client, check_instance
from meshift.services.cli.errors import EXIT_ERROR, EXIT_USAGE, CommandError
from meshift.services.cli.find import AdminClientSettings
from meshift.services.cli.settings import parse_settings

POLL_S = 0.1
BAR_CHARS = 30

SHARES = {
    "planning": 0.0, "beginning": 0.02, "adopting": 0.02, "resizing": 0.05, "loading": 0.1, "converging": 0.1,
    "committing": 0.95, "aborting": 0.95,
}  # fmt: skip
"""How much is done when a phase begins. Converging goes on with the layers that are loaded."""

Say = Callable[[str], None]


class ReconfigureSettings(AdminClientSettings):
    """Change which layers the pipeline stages of an instance hold, while it serves: for example
    `meshift reconfigure worker-1 20,10`. `meshift status` shows the layers of now."""

    instance: CliPositionalArg[str] = Field(description="the instance's name, as `meshift status` shows it")
    layers: CliPositionalArg[str] = Field("", description="layers of each stage, with commas: 16,14; 30,0")
    dry_run: bool = Field(False, description="only say what would be done")
    cancel: bool = Field(False, description="undo the change that is under way")
    commit: CommitMode = Field(CommitMode.DRAIN, description="how the stages come to switch: drain or lag")
    no_patch: bool = Field(False, description="copy KV while it is stopped, to compare")
    no_async: bool = Field(False, description="load weights while it is stopped, to compare")
    no_resize: bool = Field(False, description="leave the KV capacity as it is, to compare")
    restart: bool = Field(False, description="stop and start instead, to compare")
    tau_tokens: int = Field(50, ge=1, description="commit when no more tokens than that lag")
    bytes_per_s: float | None = Field(None, gt=0, description="what each rank sends of KV at most")
    deadline_s: float = Field(120.0, gt=0, le=3600, description="if it isn't committed by then, it is undone")
    wait: bool = Field(True, description="watch until it has ended")

    def body(self) -> ReconfigureBody:
        """What is asked for. Raises `CommandError`."""
        flags = LayoutFlags(
            no_patch=self.no_patch, no_async=self.no_async, no_resize=self.no_resize, restart=self.restart
        )
        return ReconfigureBody(
            layers=parse_layers(self.layers),
            dry_run=self.dry_run,
            commit=self.commit,
            flags=flags,
            tau_tokens=self.tau_tokens,
            bytes_per_s=self.bytes_per_s,
            deadline_s=self.deadline_s,
        )


def main(name: str, arguments: list[str]) -> int:
    """Order it, and show how it goes; exit status 1 if it doesn't come about."""
    settings = parse_settings(ReconfigureSettings, f"meshift {name}", arguments)
    check_instance(settings.instance)
    report = asyncio.run(run(settings))
    print(describe(report))
    return EXIT_ERROR if report.outcome in FAILED else 0


FAILED = (ReconfigureOutcome.ABORTED, ReconfigureOutcome.REFUSED, ReconfigureOutcome.LOST)


async def run(
    settings: ReconfigureSettings, transport: httpx.AsyncBaseTransport | None = None, say: Say | None = None
) -> ReconfigureReport:
    """The last report. Raises `CommandError`."""
    async with admin_client(settings, transport) as mesh:
        try:
            if settings.cancel:
                report = await mesh.cancel_reconfigure(settings.instance)
            else:
                report = await mesh.reconfigure(settings.instance, settings.body())
        except NotFound as error:
            raise CommandError(f"{error.message}; see `meshift status`") from error
        return await watch(mesh, report, say or show_bar) if settings.wait else report


async def watch(mesh: MeshClient, report: ReconfigureReport, say: Say) -> ReconfigureReport:
    """Until it has ended."""
    while report.outcome is None:
        say(progress_line(report))
        await asyncio.sleep(POLL_S)
        reply = await mesh.reconfigurations(report.instance_id)
        known = [*reply.ended, *reply.running]
        report = next((other for other in reversed(known) if other.change_id == report.change_id), report)
    if report.outcome is not ReconfigureOutcome.PLANNED:
        say(progress_line(report))
    return report


def parse_layers(text: str) -> tuple[int, ...]:
    """Raises `CommandError` for what is no list of numbers."""
    try:
        counts = tuple(int(word) for word in text.replace("/", ",").split(","))
    except ValueError:
        counts = (-1,)
    if min(counts) < 0:
        raise CommandError(f"layers {text!r} should be a number for each stage, as in 16,14", EXIT_USAGE)
    return counts


def share_of(report: ReconfigureReport) -> float:
    """How much is done, from 0 to 1."""
    if report.outcome is ReconfigureOutcome.COMMITTED:
        return 1.0
    change, begin = report.change, SHARES.get(report.phase, 0.0)
    if report.phase != "converging" or change is None:
        return begin
    layers = sum(stage.layers for stage in change.stages)
    loaded = sum(stage.layers_loaded for stage in change.stages)
    copied = min((stage.rounds for stage in change.stages), default=0) > 0
    done = (loaded / layers if layers else 1.0) * 0.5 + 0.5 * copied
    return begin + done * (SHARES["committing"] - begin)


def progress_line(report: ReconfigureReport) -> str:
    """A bar, the phase, and what there is to say of it."""
    share = share_of(report)
    bar = "#" * round(share * BAR_CHARS)
    figures = ""
    if report.change is not None and report.change.stages:
        stages = report.change.stages
        loaded, layers = sum(stage.layers_loaded for stage in stages), sum(stage.layers for stage in stages)
        sent = sum(stage.byte_count for stage in stages) / 2**20
        figures = f", {loaded}/{layers} layers, {sent:.1f} MiB of KV, {report.change.lag_tokens} tokens behind"
    return f"[{bar:<{BAR_CHARS}}] {share:4.0%} {report.phase}{figures}, {report.duration_s:.1f} s"


def show_bar(line: str) -> None:
    """On one line of a terminal, over and over; else a line at a time."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)
    else:
        print(line, file=sys.stderr, flush=True)


def describe(report: ReconfigureReport) -> str:
    """What came of it."""
    if report.outcome is ReconfigureOutcome.PLANNED and report.plan is not None:
        return "\n".join(report.plan.words)
    if report.outcome is None:
        return f"\n{report.instance_id}: {report.change_id} is {report.phase}"
    if report.outcome is not ReconfigureOutcome.COMMITTED or report.change is None:
        return f"\n{report.instance_id}: {report.outcome}: {report.reason or report.phase}"
    change = report.change
    target = "/".join(map(str, counts_of(change.orders.target)))
    stops = ", ".join(f"{stop / 1e6:.2f}" for stop in change.stop_ns)
    sent = sum(stage.byte_count for stage in change.stages) / 2**20
    return (
        f"\n{report.instance_id}: {target} layers, epoch {report.epoch}, in {report.duration_s:.2f} s; "
        f"stages held back for {stops} ms ({change.committed}); {sent:.1f} MiB of KV"
    )
