"""`meshift moves`: moves under way, and the newest that have ended."""

from meshift.client.mesh import MeshClient
from meshift.schemas.admin import MoveList
from meshift.schemas.moves import MoveReport
from meshift.services.cli.admin import AdminViewSettings, view
from meshift.services.cli.settings import parse_settings
from meshift.services.cli.tables import amount, seconds, table

COLUMNS = ("REQUEST", "FROM", "TO", "MODE", "OUTCOME", "ROUNDS", "TOKENS", "SENT", "FROZEN", "TOOK", "WHY")
RIGHT = frozenset({"ROUNDS", "TOKENS", "SENT", "FROZEN", "TOOK"})


class MovesSettings(AdminViewSettings):
    """Show the moves out of each live instance: those that ended, then those under way. Instances remember the newest
    ones, until they end."""


def main(name: str, arguments: list[str]) -> int:
    """Print the table."""
    settings = parse_settings(MovesSettings, f"meshift {name}", arguments)
    return view(settings, _ask, render)


async def _ask(mesh: MeshClient) -> MoveList:
    return await mesh.moves()


def render(moves: MoveList) -> str:
    """The table, and what it hasn't."""
    ended = [report for reply in moves.data for report in reply.ended]
    running = [report for reply in moves.data for report in reply.running]
    rows = [_row(report) for report in (*ended, *running)]
    lines = [table(COLUMNS, rows, RIGHT) if rows else "nothing has moved"]
    if moves.unanswered:
        lines.append(f"without those of {', '.join(moves.unanswered)}: no answer")
    return "\n".join(lines)


def _row(report: MoveReport) -> list[str]:
    figures = report.figures
    return [
        report.request_id,
        report.source.instance_id,
        report.destination.instance_id if report.destination is not None else "-",
        report.mode,
        report.outcome or report.phase,
        str(figures.rounds),
        str(figures.tokens),
        amount(figures.byte_count),
        seconds(figures.frozen_ns),
        seconds(figures.duration_ns),
        why(report),
    ]


def why(report: MoveReport) -> str:
    """What went wrong, if anything did."""
    return f"{report.refusal}: {report.reason}" if report.refusal is not None else ""
