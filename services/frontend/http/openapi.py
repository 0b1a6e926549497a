"""The OpenAPI document. Bodies are read by hand, under bounds of their own, so their schemas are put in here, from the
models that read them."""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from meshift.schemas.admin import DrainBody, MoveBody
from meshift.schemas.memory import MemoryBody
from meshift.schemas.reconfiguring import ReconfigureBody
from meshift.services.frontend.http.access import OPEN_PATHS
from meshift.services.frontend.http.errors import ErrorEnvelope
from meshift.services.frontend.http.schemas import ChatCompletion, ChatRequest, TextCompletion, TextRequest
from meshift.services.scheduler.policy.settings import PolicySettings

_REFERENCE = "#/components/schemas/{model}"

DESCRIPTION = """OpenAI's interface to the mesh. A field that isn't served is refused with 400 and named.

Every response that isn't a success has OpenAI's error object; `param` names the field."""

CHAT_EXAMPLES = {
    "chat": {
        "summary": "A question",
        "value": {"model": "smollm2", "messages": [{"role": "user", "content": "What is the capital of France?"}]},
    },
    "stream": {
        "summary": "Streamed, with the token counts at the end",
        "value": {
            "model": "smollm2",
            "messages": [{"role": "user", "content": "Tell me a story."}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 200,
        },
    },
}
TEXT_EXAMPLES = {
    "text": {
        "summary": "Two continuations of a text",
        "value": {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 32, "n": 2, "seed": 7},
    }
}

ERRORS = {
    "400": "A field is wrong or isn't served; `param` names it",
    "401": "The API key is missing or wrong",
    "404": "There is no such model, request or instance; `param` says which",
    "408": "The body didn't come in time",
    "409": "It can't be moved or changed so, now; `code` is the refusal, such as `busy` or `no_room`",
    "413": "The body, or its prompt, is too large",
    "415": "The body isn't said to be JSON",
    "429": "Too many requests; `Retry-After` says when to come back",
    "500": "A fault of this server",
    "503": "No instance can take it; `Retry-After` says when to come back",
    "504": "A service of the mesh didn't answer in time",
}

STREAM_EXAMPLE = 'data: {"id": "...", "choices": [...], ...}\n\ndata: [DONE]\n\n'

ERROR_EXAMPLE = {
    "error": {
        "message": "temperature: Input should be less than or equal to 2",
        "type": "invalid_request_error",
        "param": "temperature",
        "code": "invalid_request",
    }
}


def completion_route(
    request: type[BaseModel], answer: type[BaseModel], examples: Mapping[str, object]
) -> dict[str, Any]:
    """What the document says of a route that reads its body by hand: for `openapi_extra`."""
    return {
        "requestBody": {"required": True, "content": {"application/json": {**_schema(request), "examples": examples}}},
        "responses": {
            "200": {
                "description": "The answer; with `stream`, server-sent events: its chunks, then `[DONE]`",
                "content": {"application/json": _schema(answer), "text/event-stream": {"example": STREAM_EXAMPLE}},
            },
            **_string_keys(error_responses(*ERRORS)),
        },
    }


def error_responses(*statuses: str) -> dict[int | str, dict[str, Any]]:
    """Responses in the error format."""
    content = {"application/json": {**_schema(ErrorEnvelope), "example": ERROR_EXAMPLE}}
    return {status: {"description": ERRORS[status], "content": content} for status in statuses}


def _string_keys(responses: dict[int | str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {str(status): response for status, response in responses.items()}


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return {"schema": {"$ref": _REFERENCE.format(model=model.__name__)}}


def order_route(body: type[BaseModel], example: Mapping[str, object], *errors: str) -> dict[str, Any]:
    """What the document says of an operator's order, whose body is read by hand."""
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {**_schema(body), "example": example}},
        },
        "responses": _string_keys(error_responses(*ORDER_ERRORS, *errors)),
    }


ORDER_ERRORS = ("400", "404", "408", "413", "415", "500", "503", "504")
DRAIN_ROUTE = order_route(DrainBody, {"deadline_s": 30}, "429")
MOVE_ROUTE = order_route(MoveBody, {"destination": "worker-2", "mode": "live", "wait": True}, "409")
MEMORY_ROUTE = order_route(MemoryBody, {"capacity": 8192})
RECONFIGURE_ROUTE = order_route(ReconfigureBody, {"layers": [20, 10], "dry_run": True}, "409")
LAYOUT_ERRORS = error_responses("404", "503", "504")
SCHEDULER_ERRORS = error_responses("400", "503", "504")
EXPLAIN_ERRORS = error_responses("404")
POLICY_ROUTE: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {**_schema(PolicySettings), "example": {"migration": {"out_below": 5, "in_above": 100}}}
        },
    },
    "responses": _string_keys(error_responses("400", "413", "503", "504")),
}
CHAT_ROUTE = completion_route(ChatRequest, ChatCompletion, CHAT_EXAMPLES)
TEXT_ROUTE = completion_route(TextRequest, TextCompletion, TEXT_EXAMPLES)


def describe(app: FastAPI) -> dict[str, Any]:
    """The document; made once for an application, when it is asked for first."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=_version(), description=DESCRIPTION, routes=app.routes)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(_schemas())
        for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own error format, which isn't used here
            schemas.pop(name, None)
        document["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer", "description": "An API key; for /admin, an admin key"}
        }
        _mend_operations(document)
        app.openapi_schema = document
    return app.openapi_schema


def _schemas() -> dict[str, Any]:
    taken: tuple[type[BaseModel], ...] = (
        ChatRequest, TextRequest, DrainBody, MoveBody, MemoryBody, PolicySettings, ReconfigureBody,
    )  # fmt: skip
    given: tuple[type[BaseModel], ...] = (ChatCompletion, TextCompletion, ErrorEnvelope)
    modes: list[tuple[type[BaseModel], Any]] = [(model, "validation") for model in taken]
    modes += [(model, "serialization") for model in given]
    _, definitions = models_json_schema(modes, ref_template=_REFERENCE)
    return dict(definitions["$defs"])


def _mend_operations(document: Mapping[str, Any]) -> None:
    for path, operations in document["paths"].items():
        is_open = path in OPEN_PATHS
        for operation in operations.values():
            if not is_open:
                operation["security"] = [{"key": []}]
                operation["responses"].update(_string_keys(error_responses("401")))
            if "422" in operation["responses"]:
                del operation["responses"]["422"]
                operation["responses"].update(_string_keys(error_responses("400")))


def _version() -> str:
    try:
        return version("meshift")
    except PackageNotFoundError:
        return "0"
