"""Clients that go away, and clients that are too many."""

import asyncio
import json

import pytest

from tests.unit.frontend.fake_frontend import Fail, Script, Wait
from tests.unit.frontend.http.harness import HELLO, WAIT_S, Connection, MakeShell, Shell, error_of

BODIES = {streams: json.dumps({**HELLO, "stream": streams}).encode() for streams in (False, True)}


@pytest.mark.parametrize("streams", [False, True])
async def test_leaving_before_the_first_token_cancels(shell: Shell, streams: bool) -> None:
    shell.plays(Wait(asyncio.Event()))
    connection = Connection(shell.app, body=BODIES[streams])
    call = asyncio.ensure_future(connection.run())
    await shell.seen(streams=1)
    connection.gone.set()
    await asyncio.wait_for(call, WAIT_S)
    assert shell.frontend.streams[0].cancels == 1
    assert shell.app.state.completions.running == 0


@pytest.mark.parametrize("streams", [False, True])
async def test_leaving_in_mid_stream_cancels(shell: Shell, streams: bool) -> None:
    shell.plays(*shell.say("Paris is big")[:3], Wait(asyncio.Event()))
    connection = Connection(shell.app, body=BODIES[streams])
    call = asyncio.ensure_future(connection.run())
    await shell.seen(streams=1)
    if streams:
        assert "role" in await connection.next_body()
        assert "content" in await connection.next_body()
    connection.gone.set()
    await asyncio.wait_for(call, WAIT_S)
    assert shell.frontend.streams[0].cancels == 1
    assert shell.app.state.completions.running == 0


async def test_leaving_before_the_core_has_taken_it_cancels_the_submission(shell: Shell) -> None:
    shell.plays(accept=asyncio.Event())
    connection = Connection(shell.app)
    call = asyncio.ensure_future(connection.run())
    await shell.seen(requests=1)
    assert connection.sent.empty(), "nothing may be sent before the core has taken the request"
    connection.gone.set()
    await asyncio.wait_for(call, WAIT_S)
    assert shell.frontend.abandoned == 1
    assert connection.sent.empty()
    assert shell.app.state.completions.running == 0


async def test_the_role_comes_as_soon_as_the_core_has_taken_it(shell: Shell) -> None:
    accept, more = asyncio.Event(), asyncio.Event()
    shell.plays(Wait(more), *shell.say("x"), accept=accept)
    connection = Connection(shell.app)
    call = asyncio.ensure_future(connection.run())
    await shell.seen(requests=1)
    accept.set()
    assert '"role":"assistant"' in await connection.next_body()
    assert not call.done()
    more.set()
    await asyncio.wait_for(call, WAIT_S)


async def test_a_client_that_reads_nothing_counts_as_gone(make: MakeShell) -> None:
    shell = make(send_timeout_s=0.01)
    shell.plays(*shell.say("Paris"))
    connection = Connection(shell.app, stuck=True)
    await asyncio.wait_for(connection.run(), WAIT_S)
    assert shell.frontend.streams[0].cancels == 1
    assert shell.app.state.completions.running == 0


async def test_leaving_after_the_end_cancels_nothing(shell: Shell) -> None:
    shell.plays(*shell.say("Paris"))
    connection = Connection(shell.app)
    await asyncio.wait_for(connection.run(), WAIT_S)
    connection.gone.set()
    assert shell.frontend.streams[0].cancels == 0


@pytest.mark.parametrize("streams", [False, True])
async def test_a_server_that_stops_cancels_and_says_so_if_it_can(shell: Shell, streams: bool) -> None:
    shell.plays(Wait(asyncio.Event()))
    connection = Connection(shell.app, body=BODIES[streams])
    call = asyncio.ensure_future(connection.run())
    await shell.seen(streams=1)
    if streams:
        await connection.next_body()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(call, WAIT_S)
    assert shell.frontend.streams[0].cancels == 1
    if not streams:
        assert (await connection.sent.get())["status"] == 503
        assert "shutting down" in await connection.next_body()


async def test_a_core_that_cancels_itself_is_an_internal_error(shell: Shell) -> None:
    shell.plays(Fail(asyncio.CancelledError()))
    response = await shell.post()
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"


async def test_too_many_completions_are_refused_and_room_comes_back(make: MakeShell) -> None:
    shell = make(completions_max=2)
    go = asyncio.Event()
    shell.frontend.play = lambda _request: _waiting(shell, go)
    calls = [asyncio.ensure_future(shell.post()) for _ in range(2)]
    await shell.seen(streams=2)
    refused = await shell.post()
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert error_of(refused)["type"] == "rate_limit_error"
    go.set()
    assert [(await call).status_code for call in calls] == [200, 200]
    assert (await shell.post()).status_code == 200
    assert shell.app.state.completions.running == 0


def _waiting(shell: Shell, go: asyncio.Event) -> Script:
    return Script([Wait(go), *shell.say("x")])


@pytest.mark.parametrize("body", [{}, {**HELLO, "model": "absent"}, {**HELLO, "max_tokens": 10**6}])
async def test_refused_requests_leave_no_trace(shell: Shell, body: object) -> None:
    await shell.post(body)
    assert shell.app.state.completions.running == 0


async def test_any_moment_is_a_good_one_to_leave(shell: Shell) -> None:
    """Whatever the application was doing: no stream is left uncancelled and unfinished."""
    for moment in range(60):
        shell.plays(*shell.say("Paris is the capital"), delay=10)
        connection = Connection(shell.app, body=BODIES[moment % 2 == 0])
        call = asyncio.ensure_future(connection.run())
        for _ in range(moment):
            await asyncio.sleep(0)
        connection.gone.set()
        await asyncio.wait_for(call, WAIT_S)
    for stream in shell.frontend.streams:
        finished = stream.emitted == len(shell.tokenizer.encode("Paris is the capital"))
        assert finished or stream.cancels == 1
    assert shell.app.state.completions.running == 0
    assert shell.frontend.abandoned > 0
    assert any(stream.cancels for stream in shell.frontend.streams)
