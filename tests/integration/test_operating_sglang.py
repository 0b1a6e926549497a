"""An operator at a real mesh: two SGLang workers, streams through REST, and what an operator does meanwhile."""

import asyncio
import os
import random
from collections import Counter
from typing import Any

import httpx
import openai
import pytest

from meshift.benchmarks.failover import TOPICS, chat_of
from meshift.benchmarks.mesh_process import MeshProcess
from meshift.benchmarks.rest import stream_chat
from meshift.client.mesh import MeshClient
from meshift.schemas.admin import OpenRequest
from meshift.schemas.instances import InstanceState
from meshift.schemas.moves import MoveOutcome
from meshift.services.cli import restart_workers
from meshift.services.cli.model import SMALL_MODEL
from tests.support.moving_mesh import (
    Load,
    Memory,
    Mover,
    in_background,
    mixed_chats,
    resumes,
    until,
    until_quiet,
    until_ready,
)

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.nats,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="session"),
]

SEED = 20
SHORT_SOAK_S = 20.0
SOAK_S = 60.0 * float(os.environ.get("SOAK_MINUTES", "10"))
MOVES_MIN = 5
OTHER = {"worker-1": "worker-2", "worker-2": "worker-1"}
TOKENS = 120
GROWTH_MAX = 1.05
GROWTH_BYTES_MIN = 32 << 20
"""Less is the allocators' play."""


@pytest.fixture(autouse=True)
def only_when_asked(request: pytest.FixtureRequest) -> None:
    """`-m sglang` takes the soak in, too: it is for `make soak`."""
    if request.node.get_closest_marker("soak") and "soak" not in str(request.config.getoption("markexpr")):
        pytest.skip("`make soak` runs it")


async def openai_stream(client: openai.AsyncOpenAI, chat: dict[str, Any]) -> tuple[str, str]:
    """Text and finish reason, as the OpenAI client has them."""
    body = {name: value for name, value in chat.items() if name != "ignore_eos"}
    stream = await client.chat.completions.create(**body, stream=True, extra_body={"ignore_eos": chat["ignore_eos"]})
    text, finish = "", ""
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    return text, finish


async def there_and_back(admin: MeshClient, seen: "set[str]") -> Counter[str]:
    """Move every open request to the other instance, and again, until none is open."""
    outcomes: Counter[str] = Counter()

    async def move(item: OpenRequest) -> None:
        assert item.owner is not None
        try:
            report = await admin.move(item.request_id, OTHER[item.owner.instance_id])
        except Exception as error:
            outcomes[type(error).__name__] += 1
            return
        outcomes[str(report.outcome)] += 1
        if report.outcome is MoveOutcome.MOVED:
            seen.add(f"{item.request_id} to {report.destination}")

    while known := [item for item in await admin.open_requests() if item.owner is not None]:
        await asyncio.gather(*(move(item) for item in known))
        await asyncio.sleep(0.2)
    return outcomes


async def test_streams_are_moved_there_and_back(
    sglang_mesh: MeshProcess, sglang_rest: httpx.AsyncClient, sglang_admin: MeshClient
) -> None:
    await until_ready(sglang_admin, 2)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 7},
        {},
        {"temperature": 1.0, "seed": 9, "top_p": 0.9},
    ]
    chats = [chat_of(SMALL_MODEL, topic, TOKENS) | kind for topic, kind in zip(TOPICS, kinds, strict=False)]
    resumed = await resumes(sglang_rest)
    async with openai.AsyncOpenAI(base_url=f"{sglang_mesh.url}/v1", api_key="none", timeout=200.0) as client:
        reading = [asyncio.create_task(openai_stream(client, chat)) for chat in chats]

        async def all_open() -> bool:
            known = await sglang_admin.open_requests()
            return len(known) == len(chats) and all(item.output_tokens for item in known)

        await until(all_open, "four streams", 60.0)
        seen: set[str] = set()
        outcomes = await there_and_back(sglang_admin, seen)
        got = [await task for task in reading]
        # Afterwards: else it would all be in the prefix caches already, and no KV would move.
        assert got == [await openai_stream(client, chat) for chat in chats]
    print(f"{dict(outcomes)}, {len(seen)} ways")
    assert outcomes["moved"] >= 2 * len(chats), outcomes
    assert len(seen) == 2 * len(chats), f"not every stream went there and came back: {sorted(seen)}"
    assert await resumes(sglang_rest) == resumed
    await until_quiet(sglang_admin)


async def test_a_drain_under_streams_loses_nothing(sglang_rest: httpx.AsyncClient, sglang_admin: MeshClient) -> None:
    await until_ready(sglang_admin, 2)
    chats = [chat_of(SMALL_MODEL, topic, TOKENS) for topic in TOPICS[:6]]
    resumed = await resumes(sglang_rest)
    reading = [asyncio.create_task(stream_chat(sglang_rest, chat)) for chat in chats]

    async def both_busy() -> bool:
        return all(item.load.running >= 2 for item in await sglang_admin.instances())

    await until(both_busy, "streams on both", 60.0)
    reply = await sglang_admin.drain("worker-2", restart=True)
    assert reply.requests_left >= 2
    states: set[InstanceState] = set()

    async def has_left() -> bool:
        mine = [item for item in await sglang_admin.instances() if item.load.owner == reply.owner]
        states.update(item.load.state for item in mine)
        return not mine

    await until(has_left, "the drain's end", 60.0)
    assert InstanceState.DRAINING in states
    got = [await task for task in reading]
    undisturbed = [await stream_chat(sglang_rest, chat) for chat in chats]
    assert [(chat.text, chat.finish_reason) for chat in got] == [
        (chat.text, chat.finish_reason) for chat in undisturbed
    ]
    assert await resumes(sglang_rest) == resumed, "a stream was computed anew"
    await until_ready(sglang_admin, 2)
    await until_quiet(sglang_admin)


async def soak(
    process: MeshProcess, rest: httpx.AsyncClient, admin: MeshClient, seconds: float, chats: list[dict[str, Any]]
) -> tuple[Mover, Memory]:
    """Mixed load and a random move every second."""
    print(f"seed {SEED}, {seconds:g} s")
    await until_ready(admin, 2)
    load = Load(rest, chats, random.Random(SEED))
    resumed = await resumes(rest)
    mover, memory = Mover(admin, random.Random(SEED)), Memory()
    sampling = memory.run(process, admin, max(1.0, seconds / 200))
    async with load.running(), in_background(mover.run(1.0)), in_background(sampling):
        await asyncio.sleep(seconds)
        await until(mover.has_moved(MOVES_MIN), f"{MOVES_MIN} moves", 60.0)
    await until_quiet(admin)
    exact = await load.check()
    print(f"{exact} exact streams, {len(load.wrong)} wrong; moves: {dict(mover.outcomes)}")
    print(f"{mover.byte_count / 1e6:.1f} MB moved; frozen ms: {[round(value, 1) for value in sorted(mover.frozen_ms)]}")
    for name, (early, late) in memory.growth().items():
        print(f"{name}: {early >> 20} MiB, at the end {late >> 20} MiB")
    assert exact >= load.width
    assert not load.wrong, f"seed {SEED}: {load.wrong}"
    assert await resumes(rest) == resumed, "a stream was computed anew"
    return mover, memory


async def test_a_short_soak(sglang_mesh: MeshProcess, sglang_rest: httpx.AsyncClient, sglang_admin: MeshClient) -> None:
    mover, _ = await soak(sglang_mesh, sglang_rest, sglang_admin, SHORT_SOAK_S, mixed_chats(SMALL_MODEL, 40))
    assert mover.byte_count


@pytest.mark.soak
@pytest.mark.timeout(SOAK_S + 600)
async def test_a_long_soak(sglang_mesh: MeshProcess, sglang_rest: httpx.AsyncClient, sglang_admin: MeshClient) -> None:
    chats = mixed_chats(SMALL_MODEL, 80, variants=8)
    mover, memory = await soak(sglang_mesh, sglang_rest, sglang_admin, SOAK_S, chats)
    assert mover.moved >= SOAK_S / 4, mover.outcomes
    grown = {
        name: (early, late)
        for name, (early, late) in memory.growth().items()
        if late > early * GROWTH_MAX and late - early > GROWTH_BYTES_MIN
    }
    assert not grown, f"resident bytes, early and late: {grown}"


@pytest.mark.soak
async def test_a_rolling_restart_under_load(
    sglang_mesh: MeshProcess, sglang_rest: httpx.AsyncClient, sglang_admin: MeshClient
) -> None:
    await until_ready(sglang_admin, 2)
    load = Load(sglang_rest, mixed_chats(SMALL_MODEL, 60), random.Random(SEED))
    before = {item.load.owner for item in await sglang_admin.instances()}
    resumed = await resumes(sglang_rest)
    async with load.running():
        await restart_workers.run(restart_workers.RestartSettings(url=sglang_mesh.url))
    assert await load.check() >= load.width
    assert not load.wrong, f"seed {SEED}: {load.wrong}"
    assert not before & {item.load.owner for item in await sglang_admin.instances()}
    assert await resumes(sglang_rest) == resumed, "a stream was computed anew"
    await until_quiet(sglang_admin)
