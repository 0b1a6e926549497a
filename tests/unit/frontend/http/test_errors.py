"""Every failure has a status, a form and a place; none shows a traceback."""

import logging
from typing import Any

import pytest

from meshift.schemas import errors as mesh
from meshift.schemas.requests import FinishReason
from meshift.services.frontend.api import Chunk
from meshift.services.frontend.http import HttpSettings, create_app
from meshift.services.frontend.text.registry import TokenizerRegistry
from tests.unit.frontend.fake_frontend import Emit, Fail, FakeFrontend, Raw, model_info
from tests.unit.frontend.http.harness import (
    CHAT,
    HELLO,
    OPEN,
    MakeShell,
    Shell,
    ended,
    error_of,
    events_of,
    last_request,
    text_of,
)

STREAM = {**HELLO, "stream": True}

EXPECTED: list[tuple[mesh.MeshError, int, str, str]] = [
    (mesh.InvalidRequest("m"), 400, "invalid_request_error", "invalid_request"),
    (mesh.ContextTooLong("m"), 400, "invalid_request_error", "context_length_exceeded"),
    (mesh.MessageTooLarge("m"), 413, "invalid_request_error", "request_too_large"),
    (mesh.Unauthorized("m"), 401, "invalid_request_error", "invalid_api_key"),
    (mesh.NotFound("m"), 404, "invalid_request_error", "model_not_found"),
    (mesh.Unsupported("m"), 400, "invalid_request_error", "unsupported"),
    (mesh.MoveDeclined("m", refusal="no_room"), 409, "invalid_request_error", "no_room"),
    (mesh.LayoutDeclined("m", refusal="no_room"), 409, "invalid_request_error", "no_room"),
    (mesh.Overloaded("m"), 429, "rate_limit_error", "overloaded"),
    (mesh.Unavailable("m"), 503, "server_error", "unavailable"),
    (mesh.PeerTimeout("m"), 504, "server_error", "timeout"),
    (mesh.PeerGone("m"), 503, "server_error", "peer_gone"),
    (mesh.Stale("m"), 409, "server_error", "stale"),
    (mesh.BusClosed("m"), 503, "server_error", "bus_closed"),
    (mesh.InternalError("m"), 500, "server_error", "internal_error"),
]


def test_the_table_is_complete() -> None:
    assert {type(error) for error, *_ in EXPECTED} == set(mesh._CLASSES)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("error", "status", "kind", "code"), EXPECTED)
async def test_what_the_core_refuses_keeps_its_status(
    shell: Shell, error: mesh.MeshError, status: int, kind: str, code: str, streams: bool
) -> None:
    shell.plays(refuse=error)
    response = await shell.post({**HELLO, "stream": streams})
    assert response.status_code == status
    found = error_of(response)
    assert (found["type"], found["code"], found["message"]) == (kind, code, "m")
    assert response.headers.get("retry-after") == ("1" if status in (429, 503) else None)
    assert "x-request-id" in response.headers
    assert not shell.frontend.streams


@pytest.mark.parametrize(("error", "status", "kind", "code"), EXPECTED)
async def test_what_breaks_later_is_an_error_or_an_event(
    shell: Shell, error: mesh.MeshError, status: int, kind: str, code: str
) -> None:
    shell.plays(Emit(shell.tokenizer.encode("Paris is")), Fail(error))
    response = await shell.post()
    code = "not_found" if code == "model_not_found" else code
    assert response.status_code == status
    assert error_of(response)["code"] == code
    streamed = await shell.post(STREAM)
    assert streamed.status_code == 200
    *events, last = events_of(streamed.text)
    assert text_of(events) == "Paris is"
    assert last == {"error": {"message": "m", "type": kind, "param": None, "code": code}}
    assert [stream.cancels for stream in shell.frontend.streams] == [1, 1]


@pytest.mark.parametrize(
    ("finish", "status"),
    [
        (ended(FinishReason.ERROR, message="out of memory"), 500),
        (ended(FinishReason.CANCELLED), 503),
    ],
)
async def test_a_finish_may_be_a_failure(shell: Shell, finish: Any, status: int) -> None:
    shell.plays(*shell.say("Paris", finish=finish))
    assert (await shell.post()).status_code == status
    assert "error" in events_of((await shell.post(STREAM)).text)[-1]
    assert [stream.cancels for stream in shell.frontend.streams] == [0, 0]


@pytest.mark.parametrize(
    "steps",
    [[Emit((5,))], [Emit((5,)), Fail(RuntimeError("secret detail"))]],
    ids=["no finish", "unexpected exception"],
)
async def test_bugs_are_internal_errors_and_logged(shell: Shell, steps: Any, caplog: pytest.LogCaptureFixture) -> None:
    shell.plays(*steps)
    response = await shell.post(x_request_id="find-me")
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    assert "secret" not in response.text
    assert "Traceback" not in response.text
    assert any(record.levelno == logging.ERROR and "find-me" in record.getMessage() for record in caplog.records)
    last = events_of((await shell.post(STREAM)).text)[-1]
    assert last["error"]["code"] == "internal_error"
    assert "secret" not in str(last)


async def test_a_bug_in_the_core_s_front_is_an_internal_error(shell: Shell, caplog: pytest.LogCaptureFixture) -> None:
    shell.plays(refuse=RuntimeError("secret detail"))
    response = await shell.post()
    assert response.status_code == 500
    message = error_of(response)["message"]
    assert message == f"internal error; the server's log has it under request id {last_request(shell).request_id}"
    assert "secret detail" in caplog.text


@pytest.mark.parametrize("start", [0, 2])
async def test_a_repetition_or_a_gap_is_not_passed_on(shell: Shell, start: int) -> None:
    shell.plays(Emit(shell.tokenizer.encode("a")), Raw(Chunk(start, (6,), ended(FinishReason.STOP))))
    response = await shell.post()
    assert response.status_code == 500
    events = events_of((await shell.post(STREAM)).text)
    assert text_of(events) == "a"
    assert events[-1]["error"]["code"] == "internal_error"


async def test_a_failing_cancel_does_not_hide_the_error(shell: Shell, caplog: pytest.LogCaptureFixture) -> None:
    shell.plays(Fail(mesh.PeerGone("owner lost")), cancel_error=mesh.PeerTimeout("no answer"))
    response = await shell.post()
    assert response.status_code == 503
    assert error_of(response)["message"] == "owner lost"
    assert "could not be cancelled" in caplog.text


async def test_a_cancel_that_hangs_does_not_hold_the_answer(make: MakeShell, caplog: pytest.LogCaptureFixture) -> None:
    shell = make(cancel_timeout_s=0.01)
    shell.plays(Fail(mesh.PeerGone("owner lost")), cancel_hangs=True)
    assert (await shell.post()).status_code == 503
    assert "could not be cancelled" in caplog.text


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/chat", "/v1/models/", "/redoc"])
async def test_unknown_routes_are_not_found(refusing: Shell, path: str) -> None:
    response = await refusing.get(path)
    assert response.status_code == 404
    assert error_of(response)["code"] in ("not_found", "model_not_found")
    assert "x-request-id" in response.headers


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", CHAT), ("PUT", CHAT), ("DELETE", "/v1/models"), ("POST", "/v1/models/tiny"), ("POST", "/health")],
)
async def test_wrong_methods_are_refused(refusing: Shell, method: str, path: str) -> None:
    async with refusing.client() as client:
        response = await client.request(method, path)
    assert response.status_code == 405
    assert error_of(response)["code"] == "method_not_allowed"
    assert response.headers["allow"]


async def test_a_model_without_a_tokenizer_is_our_fault_and_the_log_says_why(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    frontend = FakeFrontend([model_info(path=str(tmp_path / "absent"))])
    app = create_app(frontend, TokenizerRegistry(), HttpSettings(), access=OPEN)
    response = await Shell(app, frontend, None).post()  # type: ignore[arg-type]
    assert response.status_code == 500
    assert error_of(response)["message"] == "this frontend has no tokenizer for model 'tiny'"
    assert "absent" not in response.text
    assert "absent is no folder" in caplog.text


async def test_parameters_of_added_routes_have_the_same_errors(shell: Shell) -> None:
    @shell.app.get("/admin/{number}")
    async def admin(number: int) -> int:
        return number

    assert (await shell.get("/admin/5")).json() == 5
    response = await shell.get("/admin/x")
    assert response.status_code == 400
    assert error_of(response)["param"] == "path.number"


async def test_an_exception_of_an_added_route_is_an_internal_error(shell: Shell) -> None:
    @shell.app.get("/broken")
    async def broken() -> int:
        raise KeyError("secret")

    response = await shell.get("/broken")
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    assert "secret" not in response.text
