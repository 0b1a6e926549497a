"""`meshift drain`: an instance takes no more requests, finishes what it has, and leaves."""

import asyncio

import httpx
from pydantic import Field
from pydantic_settings import CliPositionalArg

from meshift.client.mesh import MeshClient
from meshift.schemas import subjects
from meshift.schemas.errors import NotFound
from meshift.schemas.instances import DrainReply
from meshift.services.cli.errors import EXIT_USAGE, CommandError
from meshift.services.cli.find import AdminClientSettings, told_errors
from meshift.services.cli.settings import parse_settings


class DrainSettings(AdminClientSettings):
    """Let an instance finish its requests and leave the mesh."""

    instance: CliPositionalArg[str] = Field(description="the instance's name, as `meshift status` shows it")
    deadline_s: float = Field(30.0, ge=0, description="time for its requests to end")


def main(name: str, arguments: list[str]) -> int:
    """Begin the drain and say how many requests are left."""
    settings = parse_settings(DrainSettings, f"meshift {name}", arguments)
    try:
        subjects.check_name(settings.instance)
    except ValueError as error:
        raise CommandError(str(error), EXIT_USAGE) from error
    reply = asyncio.run(ask(settings))
    print(f"{reply.owner} drains: {reply.requests_left} requests left, {settings.deadline_s:g} s for them")
    return 0


async def ask(settings: DrainSettings, transport: httpx.AsyncBaseTransport | None = None) -> DrainReply:
    """Send the request. Raises `CommandError` if it is refused or nobody answers."""
    url = settings.rest_url()
    with told_errors(url):
        async with MeshClient(url, admin_key=settings.operator_key(), transport=transport) as mesh:
            try:
                return await mesh.drain(settings.instance, settings.deadline_s)
            except NotFound as error:
                raise CommandError(f"there is no instance {settings.instance!r}; see `meshift status`") from error
