"""Bodies: too large, too slow, not JSON."""

import asyncio
import json

import pytest
from starlette.types import Message

from meshift.schemas.errors import MessageTooLarge
from tests.unit.frontend.http.harness import CHAT, HELLO, WAIT_S, Connection, MakeShell, Shell, error_of

JSON = {"content-type": "application/json"}


async def test_a_body_at_the_limit_is_read(make: MakeShell) -> None:
    body = json.dumps(HELLO).encode()
    shell = make(body_bytes_max=len(body))
    async with shell.client() as client:
        assert (await client.post(CHAT, content=body, headers=JSON)).status_code == 200
        response = await client.post(CHAT, content=body + b" ", headers=JSON)
    assert response.status_code == 413
    assert error_of(response)["code"] == "request_too_large"
    assert response.headers["connection"] == "close"


async def test_a_body_that_says_it_is_too_large_is_answered_before_it_is_read(make: MakeShell) -> None:
    shell = make(body_bytes_max=1000)
    connection = Connection(shell.app, body=b"x" * 1001, headers={**JSON, "content-length": "1001"})
    go = hold_back(connection, after=0)
    call = asyncio.ensure_future(connection.run())
    assert json.loads(await connection.next_body())["error"]["code"] == "request_too_large"
    assert connection.received == 0
    go.set()
    await asyncio.wait_for(call, WAIT_S)
    assert connection.received == 1


async def test_an_endless_body_is_thrown_away_for_a_while_and_then_cut(make: MakeShell) -> None:
    shell = make(body_bytes_max=1000, discard_bytes_max=2000)
    connection = Connection(shell.app, body=b"x" * 400, more_body=True)
    await asyncio.wait_for(connection.run(), WAIT_S)
    start = await connection.sent.get()
    assert start["status"] == 413
    assert (b"connection", b"close") in start["headers"]
    assert connection.received == 3 + 5


async def test_a_refused_body_that_does_not_go_on_is_cut_in_time(make: MakeShell) -> None:
    shell = make(body_bytes_max=1000, body_timeout_s=0.01)
    connection = Connection(shell.app, body=b"x" * 1001, more_body=True)
    hold_back(connection, after=1)
    await asyncio.wait_for(connection.run(), WAIT_S)
    assert (await connection.sent.get())["status"] == 413


async def test_a_message_too_large_for_the_bus_waits_for_nothing(shell: Shell) -> None:
    shell.plays(refuse=MessageTooLarge("the prompt has too many tokens"))
    response = await shell.post()
    assert response.status_code == 413
    assert "connection" not in response.headers


def hold_back(connection: Connection, *, after: int) -> asyncio.Event:
    """The client sends no more after so many pieces, until the event is set."""
    go, original = asyncio.Event(), connection._receive

    async def receive() -> Message:
        if connection.received >= after:
            await go.wait()
        return await original()

    connection._receive = receive  # type: ignore[method-assign]
    return go


async def test_a_body_that_does_not_end_times_out(make: MakeShell) -> None:
    shell = make(body_timeout_s=0.01)
    connection = Connection(shell.app, more_body=True)
    hold_back(connection, after=1)
    await asyncio.wait_for(connection.run(), WAIT_S)
    assert (await connection.sent.get())["status"] == 408
    assert json.loads(await connection.next_body())["error"]["code"] == "timeout"


async def test_a_client_that_leaves_while_it_sends_gets_no_answer(shell: Shell) -> None:
    connection = Connection(shell.app, more_body=True)
    connection.gone.set()
    await asyncio.wait_for(connection.run(), WAIT_S)
    assert connection.sent.empty()
    assert shell.app.state.completions.running == 0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe{}",
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b"[" * 100_000,
        b'{"model": "tiny",}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        json.dumps(HELLO).encode("utf-16"),
    ],
    ids=["empty", "cut", "bom", "utf-8", "surrogate", "deep", "comma", "number", "utf-16"],
)
async def test_what_is_no_json_is_refused(refusing: Shell, body: bytes) -> None:
    async with refusing.client() as client:
        response = await client.post(CHAT, content=body, headers=JSON)
    assert response.status_code == 400
    assert error_of(response)["code"] == "invalid_request"
    assert "no valid JSON" in response.text


@pytest.mark.parametrize("body", [b"5", b"null", b'"x"', b"[]", b"true"])
async def test_a_body_must_be_an_object(refusing: Shell, body: bytes) -> None:
    async with refusing.client() as client:
        response = await client.post(CHAT, content=body, headers=JSON)
    assert response.status_code == 400
    assert error_of(response)["param"] is None


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"])
async def test_other_content_types_are_refused(refusing: Shell, content_type: str) -> None:
    async with refusing.client() as client:
        response = await client.post(CHAT, content=json.dumps(HELLO), headers={"content-type": content_type})
    assert response.status_code == 415
    assert error_of(response)["code"] == "unsupported_media_type"


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON", "application/x+json"])
async def test_kinds_of_json_are_read(shell: Shell, content_type: str) -> None:
    async with shell.client() as client:
        response = await client.post(CHAT, content=json.dumps(HELLO), headers={"content-type": content_type})
    assert response.status_code == 200
