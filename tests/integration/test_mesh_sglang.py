"""A real mesh: two SGLang workers on SmolLM2, NATS, scheduler and frontend as processes; real clients; kill -9."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from meshift.benchmarks.failover import TOPICS, chat_of, scheduler_round, worker_round
from meshift.benchmarks.mesh_process import MeshProcess
from meshift.benchmarks.rest import StreamedChat, stream_chat
from meshift.client.mesh import MeshClient
from meshift.schemas import subjects
from meshift.schemas.instances import LoadReport
from meshift.services.cli.client import joined_bus
from meshift.services.cli.model import SMALL_MODEL
from tests.support.moving_mesh import until_ready

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.nats,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="session"),
]

FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
OUTPUT_TOKENS = 48


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(sglang_mesh: MeshProcess, sglang_admin: MeshClient) -> MeshProcess:
    await until_ready(sglang_admin, 2)
    return sglang_mesh


@pytest.fixture(scope="module")
def rest(sglang_rest: httpx.AsyncClient) -> httpx.AsyncClient:
    return sglang_rest


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(mesh: MeshProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{mesh.url}/v1", api_key="none", timeout=200.0, max_retries=0
    ) as openai_client:
        yield openai_client


def stories() -> list[dict[str, Any]]:
    return [chat_of(SMALL_MODEL, topic, OUTPUT_TOKENS) for topic in TOPICS]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def undisturbed(rest: httpx.AsyncClient) -> list[StreamedChat]:
    return list(await asyncio.gather(*(stream_chat(rest, story) for story in stories())))


async def test_the_capital_of_france(rest: httpx.AsyncClient) -> None:
    answer = await rest.post("/v1/chat/completions", json={"model": SMALL_MODEL, "messages": FRANCE, "temperature": 0})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert "Paris" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"


async def test_the_openai_client_streams_the_same_text(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model=SMALL_MODEL, messages=FRANCE, temperature=0)
    stream = await client.chat.completions.create(
        model=SMALL_MODEL, messages=FRANCE, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    text, usage, finish = "", None, None
    async for chunk in stream:
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
            finish = chunk.choices[0].finish_reason or finish
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content
    assert finish == "stop"
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


async def test_the_client_gets_its_own_errors(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="other"):
        await client.chat.completions.create(model="other", messages=FRANCE)
    with pytest.raises(openai.BadRequestError) as too_long:
        await client.chat.completions.create(
            model=SMALL_MODEL, messages=[{"role": "user", "content": "word " * 9000}], max_tokens=5
        )
    assert too_long.value.code == "context_length_exceeded"


async def test_eight_chats_are_spread_over_both_workers(mesh: MeshProcess, rest: httpx.AsyncClient) -> None:
    most: dict[str, int] = {}

    def note(report: LoadReport) -> None:
        name = report.owner.instance_id
        most[name] = max(most.get(name, 0), report.running + report.waiting)

    async with joined_bus(mesh.state().nats_url) as bus:
        bus.subscribe(subjects.LOAD, LoadReport, note)
        chats = await asyncio.gather(*(stream_chat(rest, story) for story in stories()))
    assert all(chat.finish_reason == "length" for chat in chats)
    # Not always four and four: a report that comes amid the burst may count a request that is still charged, too.
    assert min(most["worker-1"], most["worker-2"]) >= 2, most


async def test_a_client_that_leaves_stops_its_request(mesh: MeshProcess, rest: httpx.AsyncClient) -> None:
    running: list[int] = []
    async with joined_bus(mesh.state().nats_url) as bus:
        bus.subscribe(subjects.LOAD, LoadReport, lambda report: running.append(report.running))
        body = {**chat_of(SMALL_MODEL, "rain", 2000), "stream": True}
        async with rest.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            while not any(running):
                await anext(lines)
        async with asyncio.timeout(20.0):
            del running[:]
            while len(running) < 10 or any(running[-10:]):
                await asyncio.sleep(0.05)


async def test_kill_9_of_the_scheduler(mesh: MeshProcess, rest: httpx.AsyncClient) -> None:
    seen = await scheduler_round(mesh, rest, stories()[0])
    assert seen["served_without"] == 4


async def test_kill_9_of_a_worker_under_eight_streams(
    mesh: MeshProcess, rest: httpx.AsyncClient, undisturbed: list[StreamedChat]
) -> None:
    result = await worker_round(mesh, rest, stories(), undisturbed)
    assert result.detection_ms, "no stream was on the killed worker"
    assert (result.lost, result.altered) == (0, 0)
