"""`meshift policy`: the scheduler's settings, and new ones while it runs."""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence

import httpx
from pydantic import Field, JsonValue
from pydantic_settings import CliPositionalArg

from meshift.client.mesh import MeshClient
from meshift.schemas.errors import InvalidRequest
from meshift.schemas.steering import Changes, PolicyReply
from meshift.services.cli.errors import EXIT_USAGE, CommandError
from meshift.services.cli.find import AdminClientSettings, told_errors
from meshift.services.cli.settings import parse_settings

SET = "set"


class PolicyCommandSettings(AdminClientSettings):
    """Show the scheduler's policy; with `set NAME=VALUE ...`, change it from the next decision on.

    Names are dotted: `meshift policy set policy=llumnix migration.out_below=5`. `null` gives a setting its default of
    the policy, where it has one. What is set is kept by the frontends for a scheduler that starts again, and forgotten
    with the last of them: what is to stay goes in the scheduler's environment."""

    words: CliPositionalArg[list[str]] = Field([], description="nothing, or: set NAME=VALUE ...")
    as_json: bool = Field(False, alias="json", description="as JSON")


def main(name: str, arguments: list[str]) -> int:
    """Ask, and show what is in force."""
    settings = parse_settings(PolicyCommandSettings, f"meshift {name}", arguments)
    reply = asyncio.run(ask(settings, parse_changes(settings.words)))
    print(reply.model_dump_json(indent=1) if settings.as_json else render(reply))
    return 0


def parse_changes(words: Sequence[str]) -> Changes:
    """The settings by section. Raises `CommandError` for what isn't `set NAME=VALUE ...`."""
    if not words:
        return {}
    if words[0] != SET or len(words) == 1:
        raise CommandError(f"{' '.join(words)!r} is not `{SET} NAME=VALUE ...`", EXIT_USAGE)
    changes: dict[str, JsonValue] = {}
    for word in words[1:]:
        name, equals, text = word.partition("=")
        if not equals or not all(name.split(".")):
            raise CommandError(f"{word!r} is not NAME=VALUE", EXIT_USAGE)
        _put(changes, name, _value(text))
    return changes


def _put(changes: dict[str, JsonValue], name: str, value: JsonValue) -> None:
    *sections, last = name.split(".")
    place = changes
    for section in sections:
        inner = place.setdefault(section, {})
        if not isinstance(inner, dict):
            raise CommandError(f"{name}: {section} is set to a value already", EXIT_USAGE)
        place = inner
    if last in place:
        raise CommandError(f"{name} is set twice", EXIT_USAGE)
    place[last] = value


def _value(text: str) -> JsonValue:
    """A number, `true`, `false` or `null` as in JSON; else the word itself."""
    try:
        value: JsonValue = json.loads(text)
    except ValueError:
        return text
    return value


async def ask(
    settings: AdminClientSettings, changes: Changes, transport: httpx.AsyncBaseTransport | None = None
) -> PolicyReply:
    """Raises `CommandError` if it is refused or nobody answers."""
    url = settings.rest_url()
    with told_errors(url):
        async with MeshClient(url, admin_key=settings.operator_key(), transport=transport) as mesh:
            if not changes:
                return await mesh.policy()
            try:
                return await mesh.change_policy(changes)
            except InvalidRequest as error:
                raise CommandError(f"{error.message}; nothing was changed", EXIT_USAGE) from error


def render(reply: PolicyReply) -> str:
    """A line a setting; those that operators changed have a star."""
    changed = dict(_flat(reply.changes))
    rows = [(name, _text(value), "*" if name in changed else "") for name, value in _flat(reply.settings)]
    width = max(len(name) for name, _, _ in rows)
    lines = [f"{name:<{width}}  {value}{' ' + mark if mark else ''}" for name, value, mark in rows]
    note = ["", "* changed since the scheduler's start-up settings"] if changed else []
    return "\n".join([f"policy of {reply.scheduler_id}#{reply.incarnation}", *lines, *note])


def _flat(settings: Mapping[str, JsonValue], prefix: str = "") -> Iterator[tuple[str, JsonValue]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _text(value: JsonValue) -> str:
    if value is None:
        return "unset"
    return value if isinstance(value, str) else json.dumps(value)
