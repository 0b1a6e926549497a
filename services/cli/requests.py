"""`meshift requests`: the open requests of all frontends."""

from meshift.client.mesh import MeshClient
from meshift.schemas.admin import OpenRequest, RequestList
from meshift.services.cli.admin import AdminViewSettings, view
from meshift.services.cli.settings import parse_settings
from meshift.services.cli.tables import table

COLUMNS = ("REQUEST", "MODEL", "STATE", "INSTANCE", "ATTEMPT", "MOVES", "PROMPT", "OUTPUT", "FRONTEND")
RIGHT = frozenset({"ATTEMPT", "MOVES", "PROMPT", "OUTPUT"})


class RequestsSettings(AdminViewSettings):
    """Show the open requests of all frontends, with the instance that each runs on. Each of several answers to one call
    is a request."""


def main(name: str, arguments: list[str]) -> int:
    """Print the table."""
    settings = parse_settings(RequestsSettings, f"meshift {name}", arguments)
    return view(settings, _ask, render)


async def _ask(mesh: MeshClient) -> RequestList:
    return await mesh.request_list()


def render(requests: RequestList) -> str:
    """The table, and what it hasn't."""
    lines = [table(COLUMNS, [_row(item) for item in requests.data], RIGHT) if requests.data else "no request is open"]
    if requests.total > len(requests.data):
        lines.append(f"... and {requests.total - len(requests.data)} more")
    if requests.unanswered:
        lines.append(f"without those of {', '.join(requests.unanswered)}: no answer")
    return "\n".join(lines)


def _row(item: OpenRequest) -> list[str]:
    return [
        item.request_id,
        item.model,
        item.state,
        item.owner.instance_id if item.owner is not None and item.state == "running" else "-",
        str(item.attempt),
        str(item.hop),
        str(item.prompt_tokens),
        str(item.output_tokens),
        item.frontend.frontend_id,
    ]
