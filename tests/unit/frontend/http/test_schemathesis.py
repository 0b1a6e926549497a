"""Requests that are made from the OpenAPI document: the server is never at fault, and its answers are as it says."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from schemathesis.specs.openapi.schemas import OpenApiSchema
from starlette.types import ASGIApp, Receive, Scope, Send

from meshift.services.frontend.text.tokenizer import ChatTokenizer
from tests.support.examples import examples
from tests.unit.frontend.fake_frontend import Script
from tests.unit.frontend.http.harness import make_shell

EXAMPLES = 40
"""Of each operation, where properties get their usual number."""


@pytest.fixture(scope="module")
def document(tiny_folder: Path, tiny: ChatTokenizer) -> OpenApiSchema:
    """The application's document, with the application behind it."""
    shell = make_shell(tiny_folder, tiny)
    steps = shell.say("Paris is the capital of France.")
    shell.frontend.play = lambda _request: Script(steps)
    return schemathesis.openapi.from_asgi("/openapi.json", _in_one_life(shell.app))


def _in_one_life(app: ASGIApp) -> ASGIApp:
    """The application without its lifespan: schemathesis begins and ends one around each call."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        for event in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{event}.complete"})

    return call


OPERATIONS = (
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/admin/instances"),
    ("GET", "/admin/instances/{instance_id}/memory"),
    ("POST", "/admin/instances/{instance_id}/memory"),
    ("GET", "/admin/requests"),
    ("GET", "/admin/moves"),
    ("POST", "/admin/instances/{instance_id}/drain"),
    ("POST", "/admin/requests/{request_id}/move"),
    ("GET", "/admin/reconfigurations"),
    ("GET", "/admin/instances/{instance_id}/reconfigure"),
    ("POST", "/admin/instances/{instance_id}/reconfigure"),
    ("DELETE", "/admin/instances/{instance_id}/reconfigure"),
    ("GET", "/admin/policy"),
    ("PATCH", "/admin/policy"),
    ("GET", "/admin/decisions"),
    ("GET", "/admin/explain/{request_id}"),
)
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def operation_of(result: Any) -> Any:
    """An operation that was read; a document that can't be read raises."""
    return result.ok()


def test_no_operation_is_forgotten(document: OpenApiSchema) -> None:
    found = {(item.method.upper(), item.path) for item in map(operation_of, document.get_all_operations())}
    assert found == set(OPERATIONS)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_the_document_is_served(document: OpenApiSchema, method: str, path: str) -> None:
    operation = document[path][method]

    statuses: Counter[int] = Counter()

    @settings(
        max_examples=examples(EXAMPLES),
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(case=operation.as_strategy() | operation.as_strategy(GenerationMode.NEGATIVE))
    def run(case: schemathesis.Case[Any]) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = "tiny"  # else hardly any request would get further than to the model's name
        response = case.call()
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    run()
    print(f"{method} {path}: {dict(statuses)}")
    # Hardly any made-up name is one that exists.
    named = {
        ("GET", "/v1/models/{name}"),
        ("GET", "/admin/instances/{instance_id}/memory"),
        ("GET", "/admin/explain/{request_id}"),
    }
    assert statuses[200] or (method, path) in named
