"""`meshift drain`: an instance takes no more requests, moves away those that it has, and leaves."""

import asyncio
from collections.abc import Callable

import httpx
from pydantic import Field
from pydantic_settings import CliPositionalArg

from meshift.client.mesh import MeshClient
from meshift.schemas.errors import NotFound
from meshift.schemas.identity import Owner
from meshift.schemas.instances import DrainReply
from meshift.services.cli.admin import admin_client, check_instance
from meshift.services.cli.errors import CommandError
from meshift.services.cli.find import AdminClientSettings
from meshift.services.cli.instances import drain_text
from meshift.services.cli.settings import parse_settings

POLL_S = 0.2


class DrainSettings(AdminClientSettings):
    """Move an instance's requests to other instances and let it leave the mesh."""

    instance: CliPositionalArg[str] = Field(description="the instance's name, as `meshift instances` shows it")
    deadline_s: float | None = Field(
        30.0, ge=0, le=86_400, description="then it leaves, and what is left is computed anew elsewhere; None: never"
    )
    force: bool = Field(False, description="it leaves now, whatever runs")
    restart: bool = Field(False, description="whoever started it starts it again: `meshift up`, or a container engine")
    wait: bool = Field(False, description="show how it goes on, until it has left")


def main(name: str, arguments: list[str]) -> int:
    """Begin the drain and say how many requests are left."""
    settings = parse_settings(DrainSettings, f"meshift {name}", arguments)
    check_instance(settings.instance)
    asyncio.run(run(settings))
    return 0


async def run(
    settings: DrainSettings,
    transport: httpx.AsyncBaseTransport | None = None,
    say: Callable[[str], None] = lambda text: print(text, flush=True),
) -> None:
    """Begin, and if so wished wait for the end of it. Raises `CommandError` if it is refused or nobody answers."""
    async with admin_client(settings, transport) as mesh:
        try:
            reply = await mesh.drain(
                settings.instance, settings.deadline_s, force=settings.force, restart=settings.restart
            )
        except NotFound as error:
            raise CommandError(f"there is no instance {settings.instance!r}; see `meshift instances`") from error
        say(f"{reply.owner} drains: {reply.requests_left} requests left, {_time_for_them(settings)}")
        if settings.wait:
            await until_left(mesh, reply, say)


def _time_for_them(settings: DrainSettings) -> str:
    if settings.force:
        return "no time for them"
    return "no deadline" if settings.deadline_s is None else f"{settings.deadline_s:g} s for them"


async def until_left(mesh: MeshClient, reply: DrainReply, say: Callable[[str], None]) -> None:
    """Say how a drain goes, whenever that changes, until the instance has left."""
    said = ""
    while True:
        text = await progress(mesh, reply.owner)
        if text is None:
            say(f"{reply.owner} has left")
            return
        if text.partition(", ")[0] != said.partition(", ")[0] or ("blocked" in text) != ("blocked" in said):
            say(f"{reply.owner}: {text}")
            said = text
        await asyncio.sleep(POLL_S)


async def progress(mesh: MeshClient, owner: Owner) -> str | None:
    """How far that life of an instance is with its drain; None when it has ended."""
    for item in await mesh.instances():
        if item.load.owner == owner:
            return drain_text(item.drain) if item.drain is not None else "leaving"
    return None
