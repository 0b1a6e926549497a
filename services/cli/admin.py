"""What the operators' commands share: the client, their errors, their views."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import httpx
from pydantic import BaseModel

from meshift.client.mesh import MeshClient
from meshift.schemas import subjects
from meshift.services.cli.errors import EXIT_USAGE, CommandError
from meshift.services.cli.find import AdminClientSettings, told_errors
from meshift.services.cli.tables import ViewSettings, show

AnswerT = TypeVar("AnswerT", bound=BaseModel)


class AdminViewSettings(AdminClientSettings, ViewSettings):
    """Of a command that shows something."""


@contextlib.asynccontextmanager
async def admin_client(
    settings: AdminClientSettings, transport: httpx.AsyncBaseTransport | None = None
) -> AsyncIterator[MeshClient]:
    """The mesh's client; its errors become what the user is told."""
    url = settings.rest_url()
    with told_errors(url):
        async with MeshClient(url, admin_key=settings.operator_key(), transport=transport) as mesh:
            yield mesh


def check_instance(name: str) -> None:
    """Raises `CommandError` for a name that no instance can have."""
    try:
        subjects.check_name(name)
    except ValueError as error:
        raise CommandError(str(error), EXIT_USAGE) from error


def view(
    settings: AdminViewSettings,
    ask: Callable[[MeshClient], Awaitable[AnswerT]],
    render: Callable[[AnswerT], str],
    transport: httpx.AsyncBaseTransport | None = None,
) -> int:
    """Ask and show it, as a table or as JSON, once or again and again; the exit status."""

    async def run() -> None:
        async with admin_client(settings, transport) as mesh:

            async def look() -> str:
                answer = await ask(mesh)
                return answer.model_dump_json(indent=1) if settings.as_json else render(answer)

            await show(look, settings)

    asyncio.run(run())
    return 0
