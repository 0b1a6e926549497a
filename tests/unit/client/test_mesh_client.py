"""The client, against the real HTTP shell over a scripted core, and against servers that misbehave."""

import json
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import httpx
import pytest

from meshift.client.errors import refusal
from meshift.client.mesh import MeshClient
from meshift.schemas.admin import DrainBody, MoveBody
from meshift.schemas.errors import (
    InternalError,
    InvalidRequest,
    LayoutDeclined,
    MeshError,
    MoveDeclined,
    NotFound,
    Overloaded,
    PeerGone,
    PeerTimeout,
    Unauthorized,
    Unavailable,
)
from meshift.schemas.memory import MemoryBody
from meshift.schemas.moves import MoveMode
from meshift.schemas.reconfiguring import ReconfigureBody
from meshift.services.cli import memory
from meshift.services.cli.errors import CommandError
from meshift.services.frontend.http import make_access
from meshift.services.frontend.text.tokenizer import ChatTokenizer
from tests.unit.frontend.fake_frontend import Fail
from tests.unit.frontend.http.harness import Shell, make_shell
from tests.unit.frontend.text.tiny_model import write_tiny_model

MESSAGES = [{"role": "user", "content": "hello"}]
CLIENT, ADMIN = "sk-client", "sk-admin"


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    folder = write_tiny_model(tmp_path / "tiny")
    access = make_access([CLIENT], [ADMIN], insecure_no_keys=False)
    return make_shell(folder, ChatTokenizer.load(folder), access=access)


def client(shell: Shell, api_key: str | None = CLIENT, admin_key: str | None = ADMIN) -> MeshClient:
    transport = httpx.ASGITransport(app=shell.app)
    return MeshClient("http://mesh/", api_key=api_key, admin_key=admin_key, transport=transport)


async def test_rest(shell: Shell) -> None:
    shell.plays(*shell.say("Paris is big"))
    async with client(shell) as mesh:
        assert [(model.id, model.max_model_len) for model in await mesh.models()] == [("tiny", 512)]
        answer = await mesh.chat("tiny", MESSAGES, temperature=0)
        assert answer.text == "Paris is big"
        assert answer.usage is not None
        assert answer.choices[0].finish_reason == "stop"
        events = [event async for event in mesh.stream_chat("tiny", MESSAGES)]
    assert "".join(event.text for event in events) == "Paris is big"
    assert events[-1].choices[0].finish_reason == "stop"
    assert shell.frontend.requests[0].sampling.temperature == 0.0


async def test_admin(shell: Shell) -> None:
    operators = shell.frontend.operators
    async with client(shell, api_key=None) as mesh:
        assert list(await mesh.instances()) == operators.known
        assert list(await mesh.open_requests()) == []
        assert (await mesh.request_list()).unanswered == ("frontend-9",)
        assert (await mesh.moves()).unanswered == ("worker-9",)
        reply = await mesh.drain("worker-1", None, restart=True)
        report = await mesh.move("chatcmpl-1", "worker-2", mode=MoveMode.BLOCKING, deadline_s=5.0)
        assert (await mesh.move("chatcmpl-2", wait=False)) == report == operators.report
    assert reply.requests_left == 3
    assert operators.drained == [("worker-1", DrainBody(deadline_s=None, restart=True))]
    body = MoveBody(destination="worker-2", mode=MoveMode.BLOCKING, deadline_s=5.0, wait=True)
    assert operators.moved == [("chatcmpl-1", body), ("chatcmpl-2", MoveBody())]


async def test_a_move_that_is_declined(shell: Shell) -> None:
    shell.frontend.operators.error = MoveDeclined("it stays: full", param="destination", refusal="no_room")
    async with client(shell) as mesh:
        with pytest.raises(MoveDeclined, match="it stays: full") as caught:
            await mesh.move("chatcmpl-1")
    assert (caught.value.refusal, caught.value.param) == ("no_room", "destination")


async def test_refusals_are_the_mesh_s_exceptions(shell: Shell) -> None:
    async with client(shell) as mesh:
        with pytest.raises(InvalidRequest) as caught:
            await mesh.chat("tiny", MESSAGES, temperature=3)
        assert caught.value.param == "temperature"
        with pytest.raises(NotFound, match="'absent'"):
            await mesh.chat("absent", MESSAGES)
        shell.plays(refuse=Overloaded("full"))
        with pytest.raises(Overloaded, match="full"):
            await mesh.chat("tiny", MESSAGES)
        shell.frontend.operators.error = NotFound("there is no instance")
        with pytest.raises(NotFound):
            await mesh.drain("a/b", 1.0)
    async with client(shell, api_key="wrong", admin_key=None) as mesh:
        with pytest.raises(Unauthorized):
            await mesh.models()
        with pytest.raises(Unauthorized):
            await mesh.instances()


async def test_a_stream_that_fails(shell: Shell) -> None:
    shell.plays(*shell.say("Paris is")[:2], Fail(Unavailable("no instance is left")))
    async with client(shell) as mesh:
        with pytest.raises(Unavailable, match="no instance is left"):
            [event async for event in mesh.stream_chat("tiny", MESSAGES)]


async def test_a_stream_that_is_left(shell: Shell) -> None:
    shell.plays(*shell.say("Paris is big"))
    async with client(shell) as mesh:
        async with aclosing(mesh.stream_chat("tiny", MESSAGES)) as events:
            await anext(events)
        assert (await mesh.chat("tiny", MESSAGES)).text == "Paris is big"


async def test_memory_command(shell: Shell) -> None:
    transport = httpx.ASGITransport(app=shell.app)
    name = shell.frontend.operators.known[0].load.owner.instance_id
    settings = memory.MemorySettings.model_validate({"instance": name, "url": "http://mesh", "admin_key": ADMIN})
    shown = memory.describe(await memory.ask(settings, transport))
    assert "1024 tokens = 0 used" in shown
    settings = settings.model_copy(update={"capacity": 64, "preempt": True})
    done = memory.describe_resize(await memory.ask(settings, transport))
    assert "64 tokens; 32 tokens of cached prefixes and 1 requests went, 3.0 MiB given back, 5.0 MiB held" in done
    assert "not what was asked for: requests hold the rest" in done
    assert shell.frontend.operators.resized == [(name, MemoryBody(capacity=64, preempt=True))]
    with pytest.raises(CommandError, match="there is no instance 'x'"):
        await memory.ask(settings.model_copy(update={"instance": "x", "capacity": None}), transport)


def answering(handler: Callable[[httpx.Request], httpx.Response]) -> MeshClient:
    return MeshClient("http://mesh", transport=httpx.MockTransport(handler))


@pytest.mark.parametrize(
    ("failure", "kind", "said"),
    [
        (httpx.ConnectError("refused"), PeerGone, "no mesh answers at http://mesh"),
        (httpx.ConnectTimeout("late"), PeerGone, "no mesh answers at http://mesh"),
        (httpx.ReadTimeout("late"), PeerTimeout, "silent for too long"),
        (httpx.ReadError("reset"), PeerGone, "broke: reset"),
    ],
)
async def test_connections_that_fail(failure: Exception, kind: type[MeshError], said: str) -> None:
    def handler(_request: httpx.Request) -> httpx.Response:
        raise failure

    async with answering(handler) as mesh:
        with pytest.raises(kind, match=said):
            await mesh.models()
        with pytest.raises(kind, match=said):
            [event async for event in mesh.stream_chat("m", MESSAGES)]


@pytest.mark.parametrize("body", ["", 'data: {"choices": []}\n\n', ": comment\n\n"])
async def test_a_stream_that_breaks_off(body: str) -> None:
    async with answering(lambda _: httpx.Response(200, text=body)) as mesh:
        with pytest.raises(PeerGone, match="broke off"):
            [event async for event in mesh.stream_chat("m", MESSAGES)]


async def test_an_answer_that_is_none() -> None:
    async with answering(lambda _: httpx.Response(200, text="<html>")) as mesh:
        with pytest.raises(InternalError, match="no ModelList"):
            await mesh.models()


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (503, {"message": "m", "code": "overloaded"}, Overloaded, "m"),
        (404, {"message": "m", "code": "model_not_found", "param": "model"}, NotFound, "m"),
        (418, {"message": "m"}, InvalidRequest, "m"),
        (500, {"message": "m", "code": None}, InternalError, "m"),
        (502, "<html>bad gateway", PeerGone, "HTTP 502: <html>bad gateway"),
        (400, "x" * 1000, InvalidRequest, "HTTP 400: " + "x" * 200),
    ],
)
def test_any_refusal_has_an_exception(status: int, body: object, kind: type[MeshError], message: str) -> None:
    raw = body if isinstance(body, str) else json.dumps({"error": body})
    error = refusal(status, raw.encode())
    assert type(error) is kind
    assert error.message == message


async def test_reconfigurations(shell: Shell) -> None:
    fake = shell.frontend.reconfiguring
    async with client(shell, api_key=None) as mesh:
        body = ReconfigureBody(layers=(20, 10), wait=True)
        assert await mesh.reconfigure("worker-1", body) == fake.report
        assert (await mesh.reconfigurations()).running == (fake.report,)
        assert (await mesh.reconfigurations("worker-1")).running == (fake.report,)
        await mesh.cancel_reconfigure("worker-1")
        fake.error = LayoutDeclined("it keeps its layout", param="layers", refusal="busy")
        with pytest.raises(LayoutDeclined, match="keeps its layout") as caught:
            await mesh.reconfigure("worker-1", body)
    assert (fake.asked, fake.cancelled) == ([("worker-1", body)], ["worker-1"])
    assert (caught.value.refusal, caught.value.param) == ("busy", "layers")
