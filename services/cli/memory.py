"""`meshift memory`: an instance's KV memory, and a new capacity while it serves."""

import asyncio

import httpx
from pydantic import Field
from pydantic_settings import CliPositionalArg

from meshift.client.mesh import MeshClient
from meshift.schemas import subjects
from meshift.schemas.errors import NotFound
from meshift.schemas.memory import MemoryBody, MemoryReply, MemoryUnits
from meshift.services.cli.errors import EXIT_USAGE, CommandError
from meshift.services.cli.find import AdminClientSettings, told_errors
from meshift.services.cli.settings import parse_settings


class MemorySettings(AdminClientSettings):
    """Show an instance's KV memory in tokens, pages, units and bytes; with --capacity, change it while it serves."""

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
    print(describe(answer) if settings.capacity is None else describe_resize(answer))
    return 0


def describe(memory: MemoryReply) -> str:
    """What there is, a line for each kind of figure."""
    lines = [
        f"{memory.owner}: {memory.capacity} tokens = {memory.used} used + {memory.cached} cached "
        f"+ {memory.free} free + {memory.reserved} reserved",
        f"pages     {memory.pages} of {_count(memory.page_tokens, 'token')}; "
        f"a request has {memory.request_tokens_max} tokens at most",
        *(_describe_slab() if memory.units is None else _describe_units(memory.units)),
    ]
    if memory.resident_bytes is not None:
        lines.append(f"resident  {_bytes(memory.resident_bytes)}")
    return "\n".join(lines)


def _describe_slab() -> list[str]:
    return ["units     none: one slab, shared out token by token, none of which goes back (see --layers-per-group)"]


def _describe_units(units: MemoryUnits) -> list[str]:
    return [
        f"groups    {units.groups} of {_count(units.layers_per_group, 'layer')}, the last of {units.last_group_layers}",
        f"units     {units.committed} of {units.units} committed, {units.unit_bytes} bytes each: "
        f"{_bytes(units.committed_bytes)}",
        f"waste     {units.unit_waste_bytes} bytes a unit, {units.last_unit_waste_bytes} in the last group's: "
        f"{_bytes(units.waste_bytes)} now",
    ]


def _count(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _bytes(count: int) -> str:
    return f"{count} bytes ({count / 2**20:.1f} MiB)"


def describe_resize(answer: MemoryReply) -> str:
    """What was done, in a line or two."""
    held = "" if answer.resident_bytes is None else f", {answer.resident_bytes / 2**20:.1f} MiB held"
    done = (
        f"{answer.owner}: {answer.capacity} tokens; {answer.evicted} tokens of cached prefixes and "
        f"{answer.preempted} requests went, {answer.released_bytes / 2**20:.1f} MiB given back{held}"
    )
    return f"{done}\nnot what was asked for: {answer.reason}" if answer.reason else done


async def ask(settings: MemorySettings, transport: httpx.AsyncBaseTransport | None = None) -> MemoryReply:
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
