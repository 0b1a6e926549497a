"""Answers that obey a schema."""

import json
from typing import Any

import pytest

from tests.unit.frontend.http.harness import HELLO, Shell, last_request

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.mark.parametrize(
    ("response_format", "schema"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}, SCHEMA),
        ({"type": "json_schema", "json_schema": {"name": "any", "description": "x", "schema": {}}}, {}),
    ],
)
async def test_the_core_gets_the_schema(shell: Shell, response_format: Any, schema: Any) -> None:
    response = await shell.post({**HELLO, "response_format": response_format})
    assert response.status_code == 200, response.text
    text = last_request(shell).sampling.json_schema
    assert (text if text is None else json.loads(text)) == schema
