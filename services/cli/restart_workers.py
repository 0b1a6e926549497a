"""`meshift restart-workers`: a rolling restart. Each worker's requests move to the others, it leaves, whoever started
it starts it again, and the next one has its turn when it serves."""

import asyncio
from collections.abc import Callable

import httpx
from pydantic import Field
from pydantic_settings import CliPositionalArg

from meshift.client.mesh import MeshClient
from meshift.schemas.admin import InstanceStatus
from meshift.schemas.identity import Owner
from meshift.schemas.instances import InstanceState
from meshift.services.cli.admin import admin_client, check_instance
from meshift.services.cli.drain import POLL_S, until_left
from meshift.services.cli.errors import CommandError
from meshift.services.cli.find import AdminClientSettings
from meshift.services.cli.settings import parse_settings

Say = Callable[[str], None]


class RestartSettings(AdminClientSettings):
    """Drain and restart workers, one after another, under load: `meshift up`, or a container's restart policy, starts
    each again. Stops at the first that doesn't come back."""

    instances: CliPositionalArg[list[str]] = Field([], description="which; without any, all that are live")
    deadline_s: float | None = Field(
        300.0, ge=0, le=86_400, description="of each drain; then what is left is computed anew elsewhere; None: never"
    )
    start_deadline_s: float = Field(600.0, gt=0, description="time for each to serve again")


def main(name: str, arguments: list[str]) -> int:
    """Restart them."""
    settings = parse_settings(RestartSettings, f"meshift {name}", arguments)
    for instance in settings.instances:
        check_instance(instance)
    asyncio.run(run(settings))
    return 0


async def run(
    settings: RestartSettings,
    transport: httpx.AsyncBaseTransport | None = None,
    say: Say = lambda text: print(text, flush=True),
) -> None:
    """All in turn. Raises `CommandError`."""
    async with admin_client(settings, transport) as mesh:
        live = {item.load.owner.instance_id: item for item in await mesh.instances()}
        names = settings.instances or sorted(live)
        missing = [name for name in names if name not in live]
        if missing or not names:
            raise CommandError(f"there is no instance {', '.join(missing) or 'at all'}; see `meshift instances`")
        if len(live) == 1:
            say("it is the only instance: its requests wait until it is back")
        for place, name in enumerate(names, start=1):
            say(f"[{place}/{len(names)}] {name}")
            await _restart(mesh, live[name], settings, say)


async def _restart(mesh: MeshClient, item: InstanceStatus, settings: RestartSettings, say: Say) -> None:
    reply = await mesh.drain(item.load.owner.instance_id, settings.deadline_s, restart=True)
    await until_left(mesh, reply, say)
    try:
        async with asyncio.timeout(settings.start_deadline_s):
            back = await _until_back(mesh, reply.owner)
    except TimeoutError:
        raise CommandError(
            f"{reply.owner.instance_id} doesn't serve again after {settings.start_deadline_s:g} s; "
            "the others run as they did"
        ) from None
    say(f"{back} is ready")


async def _until_back(mesh: MeshClient, former: Owner) -> Owner:
    while True:
        for item in await mesh.instances():
            owner = item.load.owner
            is_newer = owner.instance_id == former.instance_id and owner.incarnation > former.incarnation
            if is_newer and item.load.state is InstanceState.READY:
                return owner
        await asyncio.sleep(POLL_S)
