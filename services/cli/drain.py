"""`meshift drain`: an instance takes no more requests, finishes what it has, and leaves."""

import asyncio

from pydantic import Field
from pydantic_settings import CliPositionalArg

from meshift.schemas import subjects
from meshift.schemas.errors import MeshError, PeerGone
from meshift.schemas.instances import DrainReply, DrainRequest
from meshift.services.cli.client import joined_bus
from meshift.services.cli.errors import EXIT_USAGE, CommandError
from meshift.services.cli.find import BusClientSettings
from meshift.services.cli.settings import parse_settings

ANSWER_TIMEOUT_S = 5.0


class DrainSettings(BusClientSettings):
    """Let an instance finish its requests and leave the mesh."""

    instance: CliPositionalArg[str] = Field(description="the instance's name, as `meshift status` shows it")
    deadline_s: float = Field(30.0, ge=0, description="time for its requests to end")


def main(name: str, arguments: list[str]) -> int:
    """Begin the drain and say how many requests are left."""
    settings = parse_settings(DrainSettings, f"meshift {name}", arguments)
    try:
        subject = subjects.worker_drain(subjects.check_name(settings.instance))
    except ValueError as error:
        raise CommandError(str(error), EXIT_USAGE) from error
    reply = asyncio.run(ask(settings.nats_url(), subject, settings))
    print(f"{reply.owner} drains: {reply.requests_left} requests left, {settings.deadline_s:g} s for them")
    return 0


async def ask(nats_url: str, subject: str, settings: DrainSettings) -> DrainReply:
    """Send the request. Raises `CommandError` if it is refused or nobody answers."""
    request = DrainRequest(deadline_s=settings.deadline_s)
    async with joined_bus(nats_url) as bus:
        try:
            return await bus.request(subject, request, DrainReply, timeout_s=ANSWER_TIMEOUT_S)
        except PeerGone as error:
            raise CommandError(f"there is no instance {settings.instance!r}; see `meshift status`") from error
        except MeshError as error:
            raise CommandError(f"{settings.instance}: {error.message}") from error
