"""`meshift status`: the instances and their load, as they report it on the bus, and where metrics are shown."""

import asyncio

from pydantic import Field

from meshift.schemas import subjects
from meshift.schemas.errors import PeerError
from meshift.schemas.instances import LoadReport, StatusRequest, WorkerStatus
from meshift.services.bus.base import Bus
from meshift.services.cli.client import joined_bus
from meshift.services.cli.find import BusClientSettings
from meshift.services.cli.settings import parse_settings
from meshift.services.cli.tables import table

ANSWER_TIMEOUT_S = 2.0

COLUMNS = (
    "INSTANCE",
    "INCARNATION",
    "STATE",
    "MODEL",
    "RUN",
    "WAIT",
    "USED/CAPACITY",
    "FREE",
    "LAYERS",
    "ENGINE",
    "PIDS",
)
RIGHT_ALIGNED = frozenset({"RUN", "WAIT", "USED/CAPACITY", "FREE"})


class StatusSettings(BusClientSettings):
    """Show the instances of a mesh and their load. Exit status 1 when no instance reports."""

    listen_s: float = Field(0.3, gt=0, description="how long to collect reports; workers send them every 0.1 s")


def main(name: str, arguments: list[str]) -> int:
    """Print the table."""
    settings = parse_settings(StatusSettings, f"meshift {name}", arguments)
    status = asyncio.run(show(settings.nats_url(), settings.listen_s))
    for service, url in settings.metrics_urls().items():
        print(f"metrics of {service}: {url}")
    return status


async def show(nats_url: str, listen_s: float) -> int:
    """Ask the mesh at `nats_url` and print what it says."""
    async with joined_bus(nats_url) as bus:
        reports = await collect(bus, listen_s)
        rows = await asyncio.gather(*(row_of(bus, report) for report in reports))
    if not rows:
        print(f"no instance reports at {nats_url}")
        return 1
    print(table(COLUMNS, rows, RIGHT_ALIGNED))
    return 0


async def collect(bus: Bus, listen_s: float) -> list[LoadReport]:
    """The newest report of each instance that speaks within `listen_s`, by name."""
    newest: dict[str, LoadReport] = {}

    def take(report: LoadReport) -> None:
        known = newest.get(report.owner.instance_id)
        if known is None or known.owner.incarnation <= report.owner.incarnation:
            newest[report.owner.instance_id] = report

    subscription = bus.subscribe(subjects.LOAD, LoadReport, take)
    await asyncio.sleep(listen_s)
    subscription.close()
    return [newest[name] for name in sorted(newest)]


async def row_of(bus: Bus, report: LoadReport) -> list[str]:
    """A row of the table; what only the worker itself knows is left open if it doesn't answer."""
    engine, pids = "?", "?"
    subject = subjects.worker_status(report.owner.instance_id)
    try:
        status = await bus.request(subject, StatusRequest(), WorkerStatus, timeout_s=ANSWER_TIMEOUT_S)
    except PeerError:
        pass
    else:
        engine, pids = status.engine, ",".join(map(str, status.ranks)) or "-"
    return [
        report.owner.instance_id,
        str(report.owner.incarnation),
        report.state,
        report.model.name,
        str(report.running),
        str(report.waiting),
        f"{report.used}/{report.capacity}",
        str(report.free),
        layers_text(report),
        engine,
        pids,
    ]


def layers_text(report: LoadReport) -> str:
    """Layers of each stage, how often that has changed, and whether it changes just now."""
    if not report.layers:
        return "-"
    layers = "/".join(map(str, report.layers))
    epoch = f" @{report.layout_epoch}" if report.layout_epoch else ""
    return f"{layers}{epoch}{' changing' if report.layout_change else ''}"
