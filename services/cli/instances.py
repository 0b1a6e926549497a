"""`meshift instances`: the instances with their load, moves and drains, as a frontend tells of them."""

from meshift.client.mesh import MeshClient
from meshift.schemas.admin import InstanceList, InstanceStatus
from meshift.schemas.instances import DrainStatus
from meshift.services.cli.admin import AdminViewSettings, view
from meshift.services.cli.settings import parse_settings
from meshift.services.cli.tables import table

COLUMNS = ("INSTANCE", "STATE", "MODEL", "ENGINE", "RUN", "WAIT", "USED/CAPACITY", "RESERVED", "OUT", "IN", "DRAIN")
RIGHT = frozenset({"RUN", "WAIT", "USED/CAPACITY", "RESERVED", "OUT", "IN"})

FAR_S = 2 * 86_400.0
"""A drain with a deadline beyond that has none."""


class InstancesSettings(AdminViewSettings):
    """Show the instances: their load, requests moving out of and into them, and how far a drain is."""


def main(name: str, arguments: list[str]) -> int:
    """Print the table."""
    settings = parse_settings(InstancesSettings, f"meshift {name}", arguments)
    return view(settings, _ask, render)


async def _ask(mesh: MeshClient) -> InstanceList:
    return await mesh.instance_list()


def render(instances: InstanceList) -> str:
    """The table."""
    if not instances.data:
        return "no instance is live"
    return table(COLUMNS, [_row(item) for item in instances.data], RIGHT)


def _row(item: InstanceStatus) -> list[str]:
    load = item.load
    return [
        load.owner.instance_id,
        load.state,
        load.model.name,
        item.engine or "?",
        str(load.running),
        str(load.waiting),
        f"{load.used}/{load.capacity}",
        str(load.reserved),
        str(item.moves_out) if item.answers else "?",
        str(item.moves_in) if item.answers else "?",
        drain_text(item.drain) if item.answers else "doesn't answer",
    ]


def drain_text(drain: DrainStatus | None) -> str:
    """How far a drain is."""
    if drain is None:
        return "-"
    limit = "" if drain.deadline_s > FAR_S else f", {max(0.0, drain.deadline_s):.0f} s left"
    blocked = f"; blocked: {drain.blocked}" if drain.blocked else ""
    return f"{drain.left} here, {drain.moving} moving, {drain.moved} moved{limit}{blocked}"
