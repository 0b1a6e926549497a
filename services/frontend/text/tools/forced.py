"""Makes a model call a tool: a JSON schema of which every text is a list of calls."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_SHARED = ("$defs", "definitions")
"""Where a schema keeps what its `$ref`s point to: paths from the root, so it must stay at the root."""


class ConflictingDefinitions(ValueError):
    """Two tools define one name differently."""


def forced_schema(functions: Sequence[tuple[str, Mapping[str, Any] | None]], *, calls_max: int | None) -> str:
    """The schema, as text, of one call or more of `functions`, which are names and schemas of parameters. Raises
    `ConflictingDefinitions`."""
    shared: dict[str, dict[str, Any]] = {}
    items = [_call_schema(name, parameters, shared) for name, parameters in functions]
    limit = {} if calls_max is None else {"maxItems": calls_max}
    item = items[0] if len(items) == 1 else {"anyOf": items}
    return json.dumps({"type": "array", "minItems": 1, **limit, "items": item, **shared})


def _call_schema(name: str, parameters: Mapping[str, Any] | None, shared: dict[str, dict[str, Any]]) -> dict[str, Any]:
    own = dict(parameters or {"type": "object", "properties": {}})
    for key in _SHARED:
        _merge(own.pop(key, {}), shared.setdefault(key, {}))
        if not shared[key]:
            del shared[key]
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": own},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _merge(definitions: Mapping[str, Any], into: dict[str, Any]) -> None:
    for name, definition in definitions.items():
        if into.setdefault(name, definition) != definition:
            raise ConflictingDefinitions(f"two tools define {name!r} differently")
