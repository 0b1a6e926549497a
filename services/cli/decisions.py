"""`meshift decisions`: what the scheduler decided lately, and why."""

import asyncio
from typing import Literal

import httpx
from pydantic import Field

from meshift.client.mesh import MeshClient
from meshift.schemas.limits import DECISIONS_LISTED_MAX
from meshift.schemas.steering import Decision, DecisionsReply, DecisionSubject
from meshift.services.cli.find import AdminClientSettings, told_errors
from meshift.services.cli.settings import parse_settings


class DecisionsSettings(AdminClientSettings):
    """Show the scheduler's newest decisions: where requests go, which instance gives requests to which, and how many
    instances there are."""

    subject: Literal["dispatch", "pair", "headroom", "scaling"] | None = Field(None, description="only these")
    limit: int = Field(20, ge=1, le=DECISIONS_LISTED_MAX, description="how many")
    alternatives: bool = Field(False, description="say, too, what spoke against each of the others")
    as_json: bool = Field(False, alias="json", description="as JSON")


def main(name: str, arguments: list[str]) -> int:
    """Ask, and show them."""
    settings = parse_settings(DecisionsSettings, f"meshift {name}", arguments)
    reply = asyncio.run(ask(settings))
    print(reply.model_dump_json(indent=1) if settings.as_json else render(reply, settings.alternatives))
    return 0


async def ask(settings: DecisionsSettings, transport: httpx.AsyncBaseTransport | None = None) -> DecisionsReply:
    """Raises `CommandError` if nobody answers."""
    url = settings.rest_url()
    subject = None if settings.subject is None else DecisionSubject(settings.subject)
    with told_errors(url):
        async with MeshClient(url, admin_key=settings.operator_key(), transport=transport) as mesh:
            return await mesh.decisions(subject=subject, limit=settings.limit)


def render(reply: DecisionsReply, alternatives: bool) -> str:
    """The oldest of them first, and what holds now."""
    lines = [line for item in reversed(reply.decisions) for line in describe(item, alternatives)]
    lines += ["now:" if reply.current else "nothing has been looked at yet"]
    lines += [line for item in reply.current for line in describe(item, alternatives)]
    known = f"{reply.remembered} of {reply.decided} decisions of {reply.scheduler_id}#{reply.incarnation} are known"
    return "\n".join([*lines, known])


def describe(item: Decision, alternatives: bool) -> list[str]:
    """One decision in words: a line, and with `alternatives` a line for each of the others."""
    about = f" {item.request_id}/{item.attempt}" if item.request_id else ""
    lines = [f"{item.age_s:8.1f} s ago  {item.subject}{about} -> {item.decision}: {item.why}"]
    if alternatives:
        for other in item.alternatives:
            figures = ", ".join(f"{name} {_number(value)}" for name, value in other.figures.items())
            lines.append(f"{'':16}{other.name}: {other.rejected or 'chosen'} ({figures})")
        if item.alternatives_left_out:
            lines.append(f"{'':16}and {item.alternatives_left_out} more")
    return lines


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"
