"""The real server on a loopback port, spoken to by real clients."""

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import openai
import pytest
from fastapi import FastAPI

from meshift.schemas.errors import Overloaded
from meshift.schemas.requests import FinishReason
from meshift.services.frontend.http import HttpServer, serve
from meshift.services.frontend.http.server import DATE_S, ServerStartError
from meshift.services.simulation.virtual_time import run
from tests.unit.frontend.fake_frontend import Emit, Fail, Wait
from tests.unit.frontend.http.harness import CHAT, HELLO, WAIT_S, MakeShell, Shell, ended, error_of

HOST = "127.0.0.1"
STREAM = {**HELLO, "stream": True}
ANSWER = "The capital is 😀 Paris."


@asynccontextmanager
async def serving(shell: Shell, *, grace_s: int = 1) -> AsyncIterator[HttpServer]:
    server = HttpServer(shell.app, HOST, 0, grace_s=grace_s)
    await server.start()
    try:
        yield server
    finally:
        await asyncio.wait_for(server.stop(), WAIT_S)


def url(server: HttpServer) -> str:
    return f"http://{HOST}:{server.port}"


def openai_client(server: HttpServer) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url(server)}/v1", api_key="none", timeout=WAIT_S, max_retries=0)


async def test_the_openai_client(shell: Shell) -> None:
    shell.plays(*shell.say(ANSWER, finish=ended(FinishReason.LENGTH, cached_tokens=2)))
    async with serving(shell) as server, openai_client(server) as client:
        assert [model.id for model in (await client.models.list()).data] == ["tiny"]
        assert (await client.models.retrieve("tiny")).owned_by == "meshift"
        whole = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hello"}],
            temperature=0.5,
            stop=["never"],
            extra_body={"top_k": 5},
        )
        assert whole.choices[0].message.content == ANSWER
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        assert whole.usage.prompt_tokens_details.cached_tokens == 2
        assert whole._request_id == whole.id == shell.frontend.requests[0].request_id
        again = whole.choices[0].message.model_dump()
        await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}, again, {"role": "user", "content": "more"}],  # type: ignore[list-item]
        )


async def test_the_openai_client_streams(shell: Shell) -> None:
    shell.plays(*shell.say(ANSWER))
    async with serving(shell) as server, openai_client(server) as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        text, usage = "", None
        async for chunk in stream:
            usage = chunk.usage
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == ANSWER
    assert usage is not None
    assert usage.completion_tokens == len(shell.tokenizer.encode(ANSWER))


async def test_the_openai_client_understands_the_errors(shell: Shell) -> None:
    async with serving(shell) as server, openai_client(server) as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="x", messages=[{"role": "user", "content": "hello"}])
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
        shell.plays(refuse=Overloaded("full"))
        with pytest.raises(openai.RateLimitError) as full:
            await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])
        assert full.value.response.headers["retry-after"] == "1"
        shell.plays(Emit((5,)), Fail(Overloaded("broken")))
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], stream=True
        )
        with pytest.raises(openai.APIError, match="broken"):
            async for _ in stream:
                pass


async def test_tokens_are_not_held_back_by_the_server(shell: Shell) -> None:
    more = asyncio.Event()
    shell.plays(*shell.say("Paris")[:-1], Wait(more), *shell.say("x"))
    async with (
        serving(shell) as server,
        httpx.AsyncClient(timeout=WAIT_S) as client,
        client.stream("POST", url(server) + CHAT, json=STREAM) as response,
    ):
        lines = response.aiter_lines()
        assert "role" in await anext(lines)
        assert await anext(lines) == ""
        assert "content" in await anext(lines)
        more.set()
        assert [line async for line in lines][-2] == "data: [DONE]"


@pytest.mark.parametrize("streams", [False, True])
async def test_a_closed_connection_cancels_the_request(shell: Shell, streams: bool) -> None:
    shell.plays(*shell.say("Paris is")[:-1], Wait(asyncio.Event()))
    body = json.dumps({**HELLO, "stream": streams}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    async with serving(shell) as server, asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection(HOST, server.port)
        writer.write(head.encode() + body)
        await shell.seen(streams=1)
        if streams:
            await reader.readuntil(b"content")
        writer.close()
        await shell.frontend.streams[0].cancelled.wait()
    assert shell.frontend.streams[0].cancels == 1
    assert shell.app.state.completions.running == 0


async def test_a_body_that_is_far_too_large_is_refused_in_words(make: MakeShell) -> None:
    shell = make(body_bytes_max=1000)
    async with serving(shell) as server, httpx.AsyncClient(timeout=WAIT_S) as client:
        response = await client.post(url(server) + CHAT, json={**HELLO, "user": "x" * 8_000_000})
        assert response.status_code == 413
        assert error_of(response)["code"] == "request_too_large"
        assert (await client.post(url(server) + CHAT, json=HELLO)).status_code == 200


async def test_what_is_no_http_hurts_nobody(shell: Shell) -> None:
    async with serving(shell) as server, asyncio.timeout(WAIT_S):
        for data in (b"\x00\xff\r\n\r\n", b"GET /" + b"x" * 200_000, b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n"):
            reader, writer = await asyncio.open_connection(HOST, server.port)
            writer.write(data)
            writer.write_eof()
            answer = await reader.read(1000)
            assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
            writer.close()
        async with httpx.AsyncClient(timeout=WAIT_S) as client:
            assert (await client.get(url(server) + "/health")).status_code == 200


async def test_stopping_lets_requests_in_flight_end(shell: Shell) -> None:
    more = asyncio.Event()
    shell.plays(Wait(more), *shell.say(ANSWER))
    async with httpx.AsyncClient(timeout=WAIT_S) as client, serving(shell, grace_s=5) as server:
        call = asyncio.ensure_future(client.post(url(server) + CHAT, json=HELLO))
        await shell.seen(streams=1)
        stopping = asyncio.ensure_future(server.stop())
        await until_refused(server.port)
        assert not stopping.done()
        more.set()
        assert (await call).json()["choices"][0]["message"]["content"] == ANSWER
        await asyncio.wait_for(stopping, WAIT_S)
    assert shell.frontend.streams[0].cancels == 0


async def test_stopping_cancels_what_does_not_end(shell: Shell) -> None:
    shell.plays(Wait(asyncio.Event()))
    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        async with serving(shell, grace_s=0) as server:
            whole = asyncio.ensure_future(client.post(url(server) + CHAT, json=HELLO))
            streamed = asyncio.ensure_future(client.post(url(server) + CHAT, json=STREAM))
            await shell.seen(streams=2)
            await asyncio.wait_for(server.stop(), WAIT_S)
        assert [stream.cancels for stream in shell.frontend.streams] == [1, 1]
        assert (await whole).status_code == 503
        with pytest.raises(httpx.RemoteProtocolError):
            await streamed


async def test_serve_sets_started_and_obeys_stop(shell: Shell) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
    started, stop = asyncio.Event(), asyncio.Event()
    serving_task = asyncio.ensure_future(serve(shell.app, HOST, port, stop=stop, started=started, grace_s=1))
    await asyncio.wait_for(started.wait(), WAIT_S)
    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        assert (await client.get(f"http://{HOST}:{port}/health")).status_code == 200
    stop.set()
    await asyncio.wait_for(serving_task, WAIT_S)
    await until_refused(port)


async def test_a_cancelled_serve_stops_too(shell: Shell) -> None:
    started = asyncio.Event()
    task = asyncio.ensure_future(serve(shell.app, HOST, 0, stop=asyncio.Event(), started=started, grace_s=1))
    await asyncio.wait_for(started.wait(), WAIT_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, WAIT_S)


async def test_signal_handlers_are_left_alone(shell: Shell) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    async with serving(shell):
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


async def test_a_taken_port_is_an_error(shell: Shell) -> None:
    with socket.create_server((HOST, 0)) as taken, pytest.raises(OSError, match="in use"):
        await HttpServer(shell.app, HOST, taken.getsockname()[1]).start()


async def test_an_application_that_does_not_start_is_an_error_and_not_an_exit() -> None:
    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        raise RuntimeError("no")
        yield

    server = HttpServer(FastAPI(lifespan=lifespan), HOST, 0)
    with pytest.raises(ServerStartError):
        await asyncio.wait_for(server.start(), WAIT_S)
    await until_refused(server.port)


async def test_the_end_of_the_application_ends_its_threads(make: MakeShell) -> None:
    shell = make(inline_chars_max=0)
    async with serving(shell) as server, httpx.AsyncClient(timeout=WAIT_S) as client:
        assert (await client.post(url(server) + CHAT, json=HELLO)).status_code == 200
    with pytest.raises(RuntimeError, match="shutdown"):
        await shell.app.state.completions._threads.run(int)


async def until_refused(port: int) -> None:
    """Wait until nobody listens."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                _, writer = await asyncio.open_connection(HOST, port)
            except ConnectionRefusedError:
                return
            except ConnectionResetError:
                continue  # It was in the queue of a socket that has just been closed.
            writer.close()
            await asyncio.sleep(0.01)


def test_an_idle_server_sleeps_and_leaves_when_it_is_told() -> None:
    """It wakes once for each `Date`, and not to see whether it is to leave."""

    async def main() -> None:
        server, loop = HttpServer(FastAPI(), HOST, 0)._server, asyncio.get_running_loop()
        turns: list[float] = []
        on_tick = server.on_tick

        async def counted(counter: int) -> bool:
            turns.append(loop.time())
            return await on_tick(counter)

        server.on_tick = counted  # type: ignore[method-assign]
        begin_s, serving = loop.time(), asyncio.ensure_future(server.main_loop())
        await asyncio.sleep(10.5 * DATE_S)
        assert turns == pytest.approx([begin_s + turn * DATE_S for turn in range(11)])
        assert server.server_state.default_headers[0][0] == b"date"
        server.leave()
        await serving
        assert loop.time() == begin_s + 10.5 * DATE_S

    run(main())
