"""An operator at a mesh of processes with simulated engines, whose KV goes over TCP: moves by hand, a rolling restart
under load."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from meshift.benchmarks.failover import chat_of
from meshift.benchmarks.mesh_process import MeshProcess, running_mesh
from meshift.benchmarks.rest import StreamedChat, stream_chat
from meshift.client.mesh import MeshClient
from meshift.schemas.errors import MoveDeclined
from meshift.services.cli.model import SMALL_MODEL
from meshift.services.cli.paths import models_folder
from tests.support.moving_mesh import Load, Mover, in_background, mixed_chats, resumes, until, until_quiet, until_ready
from tests.support.processes import run_meshift

pytestmark = [
    pytest.mark.nats,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
]

SEED = 5
DEADLINE_S = 60.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MeshProcess]:
    folder = models_folder() / SMALL_MODEL
    if not (folder / "config.json").exists():
        pytest.skip("the small model isn't prepared: `meshift model prepare smollm2`")
    up = ("--engine", "sim", "--workers", "2", "--pp", "2", "--model", str(folder))
    async with running_mesh(tmp_path_factory.mktemp("sim"), *up, settings={"MESHIFT_SIM_SPEED": "2"}) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rest(mesh: MeshProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=mesh.url, timeout=DEADLINE_S) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def admin(mesh: MeshProcess) -> AsyncIterator[MeshClient]:
    async with MeshClient(mesh.url) as client:
        yield client


async def meshift(state_dir: Path, *arguments: str) -> tuple[int, str]:
    """Run a command; its exit status and output."""
    return await run_meshift(*arguments, "--state-dir", str(state_dir), deadline_s=2 * DEADLINE_S)


async def test_a_stream_is_moved_by_hand(mesh: MeshProcess, rest: httpx.AsyncClient, admin: MeshClient) -> None:
    """One of two that ask for the same."""
    chat = chat_of(SMALL_MODEL, "the sea", 1800)
    streams = [StreamedChat(), StreamedChat()]
    reading = [asyncio.create_task(stream_chat(rest, chat, into=stream)) for stream in streams]

    async def begun() -> bool:
        return all(len(stream.times_s) > 5 for stream in streams)

    await until(begun, "some text", DEADLINE_S)
    request_id, source = await an_open_request(mesh)
    destination = {"worker-1": "worker-2", "worker-2": "worker-1"}[source]
    status, text = await meshift(mesh.state_dir, "move", request_id[:-4], "--to", destination)
    assert status == 0, text
    assert f"{source} -> {destination}: moved in" in text
    with pytest.raises(MoveDeclined, match="it is there already"):
        await admin.move(request_id, destination)
    status, text = await meshift(mesh.state_dir, "moves")
    rows = [line.split()[:5] for line in text.splitlines()]
    assert [request_id, source, destination, "live", "moved"] in rows, text
    moved, other = await asyncio.gather(*reading)
    assert (moved.text, moved.finish_reason) == (other.text, other.finish_reason)
    assert moved.finish_reason == "length"
    status, text = await meshift(mesh.state_dir, "move", request_id)
    assert (status, "no open request" in text) == (1, True)
    await until_quiet(admin)


async def test_an_instance_changes_shape_by_hand(mesh: MeshProcess, rest: httpx.AsyncClient, admin: MeshClient) -> None:
    """Both instances, one after the other, while the same is asked of each."""
    chat = chat_of(SMALL_MODEL, "the mountains", 1800)
    streams = [StreamedChat(), StreamedChat()]
    reading = [asyncio.create_task(stream_chat(rest, chat, into=stream)) for stream in streams]

    async def begun() -> bool:
        return all(len(stream.times_s) > 5 for stream in streams)

    await until(begun, "some text", DEADLINE_S)
    status, text = await meshift(mesh.state_dir, "reconfigure", "worker-1", "17,15")
    assert (status, "16/16 or 20/12" in text) == (1, True), text
    status, text = await meshift(mesh.state_dir, "reconfigure", "worker-1", "20,12", "--dry-run")
    assert (status, text.splitlines()[0]) == (0, "16/16 -> 20/12 layers, epoch 0")
    status, text = await meshift(mesh.state_dir, "reconfigure", "worker-1", "20,12")
    assert status == 0, text
    assert "worker-1: 20/12 layers, epoch 1" in text
    first, second = await asyncio.gather(*reading)
    assert (first.text, first.finish_reason) == (second.text, second.finish_reason)
    refused, ended = (await admin.reconfigurations("worker-1")).ended
    assert str(refused.outcome) == "refused"
    assert str(ended.outcome) == "committed"
    layers = {item.load.owner.instance_id: item.load.layers for item in await admin.instances()}
    assert layers == {"worker-1": (20, 12), "worker-2": (16, 16)}
    await until_quiet(admin)


async def an_open_request(mesh: MeshProcess) -> tuple[str, str]:
    """The first one's id, and the instance that it is on."""
    status, text = await meshift(mesh.state_dir, "requests", "--json")
    assert status == 0, text
    first, _ = json.loads(text)["data"]
    return first["request_id"], first["owner"][0]


async def test_a_rolling_restart_under_load(mesh: MeshProcess, rest: httpx.AsyncClient, admin: MeshClient) -> None:
    load = Load(rest, mixed_chats(SMALL_MODEL, 60, schemas=False, variants=2), random.Random(SEED), width=6)
    before = {item.load.owner for item in await admin.instances()}
    resumed = await resumes(rest)
    async with load.running():
        status, text = await meshift(mesh.state_dir, "restart-workers")
    assert status == 0, text
    assert "worker-2#" in text.splitlines()[-1], text
    assert await load.check() >= load.width
    assert not load.wrong, f"seed {SEED}"
    await until_ready(admin, 2)
    after = {item.load.owner for item in await admin.instances()}
    assert {owner.instance_id for owner in after} == {"worker-1", "worker-2"}
    assert not after & before
    assert await resumes(rest) == resumed, "a stream was lost and computed anew"
    await until_quiet(admin)


async def test_random_moves_under_load(rest: httpx.AsyncClient, admin: MeshClient) -> None:
    load = Load(rest, mixed_chats(SMALL_MODEL, 60, schemas=False, variants=2), random.Random(SEED), width=6)
    mover = Mover(admin, random.Random(SEED))
    async with load.running(), in_background(mover.run(0.1)):
        await until(mover.has_moved(8), "eight moves", DEADLINE_S)
    print(f"seed {SEED}: {dict(mover.outcomes)}, {mover.byte_count / 1e6:.0f} MB")
    assert await load.check() >= load.width
    assert not load.wrong, f"seed {SEED}"
    await until_quiet(admin)
