"""`meshift memory`: an instance's KV memory, and a new capacity while it serves."""

import asyncio

import httpx
from pydantic import Field
from pydantic_settings import CliPositionalArg

from meshift.client.mesh import MeshClient
from meshift.schemas import subjects
from meshift.schemas.errors import NotFound
from meshift.schemas.instances import LoadReport
from meshift.schemas.memory import MemoryBody, MemoryReply
from meshift.services.cli.errors import EXIT_USAGE, CommandError
from meshift.services.cli.find import AdminClientSettings, told_errors
from meshift.services.cli.settings import parse_settings


class MemorySettings(AdminClientSettings):
    """Show an instance's KV memory in tokens; with --capacity, change it while the instance serves."""

    instance: CliPositionalArg[str] = Field(description="the instance's name, as `meshift status` shows it")
    capacity: int | None = Field(None, ge=1, description="the new capacity, in tokens")
    preempt: bool = Field(False, description="running requests may lose their memory for it, and wait again")


def main(name: str, arguments: list[str]) -> int:
    """Ask, and say what there is, or what was done."""
    settings = parse_settings(MemorySettings, f"meshift {name}", arguments)
    try:
        subjects.check_name(settings.instance)
    except ValueError as error:
        raise CommandError(str(error), EXIT_USAGE) from error
    answer = asyncio.run(ask(settings))
    print(describe(answer))
    return 0


def describe(answer: LoadReport | MemoryReply) -> str:
    """In a line or two."""
    if isinstance(answer, LoadReport):
        return (
            f"{answer.owner}: {answer.capacity} tokens = {answer.used} used + {answer.cached} cached "
            f"+ {answer.free} free + {answer.reserved} reserved"
        )
    done = (
        f"{answer.owner}: {answer.capacity} tokens; {answer.evicted} tokens of cached prefixes and "
        f"{answer.preempted} requests went, {answer.released_bytes / 2**20:.1f} MiB given back, "
        f"{answer.resident_bytes / 2**20:.1f} MiB held"
    )
    return f"{done}\nnot what was asked for: {answer.reason}" if answer.reason else done


async def ask(settings: MemorySettings, transport: httpx.AsyncBaseTransport | None = None) -> LoadReport | MemoryReply:
    """Raises `CommandError` if it is refused or nobody answers."""
    url = settings.rest_url()
    with told_errors(url):
        async with MeshClient(url, admin_key=settings.operator_key(), transport=transport) as mesh:
            try:
                if settings.capacity is None:
                    return await mesh.memory(settings.instance)
                return await mesh.resize_memory(
                    settings.instance, MemoryBody(capacity=settings.capacity, preempt=settings.preempt)
                )
            except NotFound as error:
                raise CommandError(f"there is no instance {settings.instance!r}; see `meshift status`") from error
