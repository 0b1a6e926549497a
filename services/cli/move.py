"""`meshift move`: an open request goes on at another instance; its client doesn't notice."""

import asyncio
from typing import Literal

import httpx
from pydantic import Field
from pydantic_settings import CliPositionalArg

from meshift.schemas.errors import NotFound
from meshift.schemas.moves import MoveMode, MoveOutcome, MoveReport
from meshift.services.cli.admin import admin_client, check_instance
from meshift.services.cli.errors import EXIT_ERROR, CommandError
from meshift.services.cli.find import AdminClientSettings
from meshift.services.cli.moves import why
from meshift.services.cli.settings import parse_settings
from meshift.services.cli.tables import amount, seconds


class MoveSettings(AdminClientSettings):
    """Move an open request to another instance, and say what it took. Exit status 1 if it stays where it is."""

    request: CliPositionalArg[str] = Field(
        description="the request's id, as `meshift requests` shows it; the beginning of it will do if no other has it"
    )
    to: str | None = Field(None, description="the instance; without it, wherever there is room")
    mode: Literal["live", "blocking", "recompute"] = Field(
        "live",
        description="live: its KV is copied while it goes on; blocking: while it is stopped; recompute: not copied",
    )
    deadline_s: float = Field(30.0, gt=0, le=3600, description="if it hasn't come about by then, the request stays")
    wait: bool = Field(True, description="wait for the end of it")
    as_json: bool = Field(False, alias="json", description="the report as JSON")


def main(name: str, arguments: list[str]) -> int:
    """Order it and print what became of it."""
    settings = parse_settings(MoveSettings, f"meshift {name}", arguments)
    if settings.to is not None:
        check_instance(settings.to)
    report = asyncio.run(order(settings))
    print(report.model_dump_json(indent=1) if settings.as_json else describe(report))
    return 0 if report.outcome in (MoveOutcome.MOVED, None) else EXIT_ERROR


async def order(settings: MoveSettings, transport: httpx.AsyncBaseTransport | None = None) -> MoveReport:
    """The mesh's report. Raises `CommandError`."""
    async with admin_client(settings, transport) as mesh:
        request_id = _choose(settings.request, [item.request_id for item in await mesh.open_requests()])
        try:
            return await mesh.move(
                request_id,
                settings.to,
                mode=MoveMode(settings.mode),
                deadline_s=settings.deadline_s,
                wait=settings.wait,
            )
        except NotFound as error:
            hint = "meshift instances" if error.param == "destination" else "meshift requests"
            raise CommandError(f"{error.message}; see `{hint}`") from error


def _choose(text: str, known: list[str]) -> str:
    """The request that is meant. What isn't known is left to the mesh, which may have more than it lists."""
    found = [request_id for request_id in known if request_id.startswith(text)]
    if text in known or not found:
        return text
    if len(found) > 1:
        raise CommandError(f"{text!r} may be any of {len(found)} requests: {', '.join(sorted(found)[:3])}...")
    return found[0]


def describe(report: MoveReport) -> str:
    """In words."""
    there = report.destination.instance_id if report.destination is not None else "another instance"
    way = f"{report.request_id}: {report.source.instance_id} -> {there}"
    if report.outcome is None:
        return f"{way}: {report.phase}; `meshift moves` shows how it goes"
    if report.outcome is not MoveOutcome.MOVED:
        return f"{way}: {report.outcome}, {why(report) or report.phase}"
    figures = report.figures
    took = f"{seconds(figures.duration_ns)}, frozen for {seconds(figures.frozen_ns)}"
    if report.mode is MoveMode.RECOMPUTE:
        return f"{way}: moved in {took}; to be computed anew there"
    sent = f"{figures.tokens} tokens, {amount(figures.byte_count)} in {figures.rounds} rounds"
    return f"{way}: moved in {took}; {sent}"
