"""`meshift explain`: why a request went where it went."""

import asyncio

import httpx
from pydantic import Field
from pydantic_settings import CliPositionalArg

from meshift.client.mesh import MeshClient
from meshift.schemas.errors import NotFound
from meshift.schemas.moves import MoveReport
from meshift.schemas.steering import RequestExplanation
from meshift.services.cli.decisions import describe
from meshift.services.cli.errors import CommandError
from meshift.services.cli.find import AdminClientSettings, told_errors
from meshift.services.cli.settings import parse_settings


class ExplainSettings(AdminClientSettings):
    """Say where a request was sent and why, and where it moved and why, as far as the mesh remembers: the scheduler its
    newest decisions, each instance its newest moves."""

    request: CliPositionalArg[str] = Field(description="the request's id: the `id` of its answer")
    alternatives: bool = Field(True, description="say, too, what spoke against each of the others")
    as_json: bool = Field(False, alias="json", description="as JSON")


def main(name: str, arguments: list[str]) -> int:
    """Ask, and say it."""
    settings = parse_settings(ExplainSettings, f"meshift {name}", arguments)
    explanation = asyncio.run(ask(settings))
    print(explanation.model_dump_json(indent=1) if settings.as_json else render(explanation, settings.alternatives))
    return 0


async def ask(settings: ExplainSettings, transport: httpx.AsyncBaseTransport | None = None) -> RequestExplanation:
    """Raises `CommandError` if nothing is known or nobody answers."""
    url = settings.rest_url()
    with told_errors(url):
        async with MeshClient(url, admin_key=settings.operator_key(), transport=transport) as mesh:
            try:
                return await mesh.explain(settings.request)
            except NotFound as error:
                hint = "the newest decisions and moves are remembered, and lost with their scheduler or instance"
                raise CommandError(f"{error.message}: {hint}") from error


def render(explanation: RequestExplanation, alternatives: bool) -> str:
    """In words: dispatches, then moves with what paired their instances."""
    where = f"{explanation.owner} has it" if explanation.owner else "it has ended, or this frontend doesn't serve it"
    lines = [f"{explanation.request_id}: {where}"]
    lines += [line for item in explanation.dispatches for line in describe(item, alternatives)]
    lines += [_move(move) for move in explanation.moves]
    lines += [line for item in explanation.pairs for line in describe(item, alternatives)]
    if not explanation.moves:
        lines.append("no move of it is known")
    if explanation.unanswered:
        lines.append(f"no answer from {', '.join(explanation.unanswered)}: what they know is missing")
    return "\n".join(lines)


def _move(move: MoveReport) -> str:
    way = f"{move.source} -> {move.destination or 'wherever there is room'}"
    outcome = move.phase if move.outcome is None else str(move.outcome)
    why = ": ".join(filter(None, (str(move.refusal or ""), move.reason)))
    frozen = f", frozen for {move.figures.frozen_ns / 1e6:.1f} ms" if move.figures.frozen_ns else ""
    return f"move {way} ({move.mode}): {outcome}{frozen}{': ' + why if why else ''}"
