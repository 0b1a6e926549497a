"""What operators see and do."""

from typing import Any

import httpx
import pytest

from meshift.schemas.admin import InstanceList, OpenRequest, RequestList
from meshift.schemas.errors import NotFound, Overloaded, Unsupported
from meshift.schemas.identity import Owner
from meshift.schemas.instances import LoadReport
from meshift.schemas.memory import MemoryBody, MemoryReply
from meshift.schemas.requests import Priority
from tests.unit.frontend.http.harness import Shell, error_of

OPEN = OpenRequest(
    request_id="chatcmpl-1",
    model="tiny",
    state="running",
    attempt=2,
    hop=1,
    owner=Owner(instance_id="worker-1", incarnation=3),
    prompt_tokens=7,
    output_tokens=5,
    priority=Priority(scheduling=1, execution=1),
)


async def drain(shell: Shell, body: Any, instance_id: str = "worker-1") -> httpx.Response:
    async with shell.client() as client:
        return await client.post(f"/admin/instances/{instance_id}/drain", json=body)


async def test_instances(shell: Shell) -> None:
    response = await shell.get("/admin/instances")
    assert InstanceList.model_validate(response.json()).data == tuple(shell.frontend.instances())


async def test_requests(shell: Shell) -> None:
    shell.frontend.still_open = [OPEN]
    response = await shell.get("/admin/requests")
    assert RequestList.model_validate(response.json()).data == (OPEN,)


@pytest.mark.parametrize(("body", "deadline_s"), [({}, 30.0), ({"deadline_s": 5}, 5.0)])
async def test_drain(shell: Shell, body: Any, deadline_s: float) -> None:
    response = await drain(shell, body)
    assert response.status_code == 200
    assert response.json()["requests_left"] == 3
    assert shell.frontend.drained == [("worker-1", deadline_s)]


async def test_refused_drains(shell: Shell) -> None:
    for body in ({"deadline_s": -1}, {"deadline_s": "soon"}, {"deadline_s": 10**9}):
        assert error_of(await drain(shell, body))["param"] == "deadline_s"
    assert error_of(await drain(shell, {"x": 1}))["param"] == "x"
    shell.frontend.drain_error = NotFound("there is no instance 'w'", param="instance_id")
    response = await drain(shell, {}, "w")
    assert (response.status_code, error_of(response)["code"]) == (404, "not_found")
    shell.frontend.drain_error = Overloaded("it drains already")
    assert (await drain(shell, {})).status_code == 429
    assert not shell.frontend.drained


async def resize(shell: Shell, body: Any, instance_id: str = "worker-1") -> httpx.Response:
    async with shell.client() as client:
        return await client.post(f"/admin/instances/{instance_id}/memory", json=body)


async def test_memory(shell: Shell) -> None:
    report = shell.frontend.instances()[0]
    response = await shell.get(f"/admin/instances/{report.owner.instance_id}/memory")
    assert LoadReport.model_validate(response.json()) == report
    assert error_of(await shell.get("/admin/instances/nobody/memory"))["param"] == "instance_id"


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        ({"capacity": 8}, MemoryBody(capacity=8)),
        ({"capacity": 9, "preempt": True}, MemoryBody(capacity=9, preempt=True)),
    ],
)
async def test_a_new_capacity(shell: Shell, body: Any, asked: MemoryBody) -> None:
    response = await resize(shell, body)
    reply = MemoryReply.model_validate(response.json())
    assert (reply.capacity, reply.reason) == (asked.capacity, "requests hold the rest")
    assert shell.frontend.resized == [("worker-1", asked)]


async def test_refused_capacities(shell: Shell) -> None:
    for body in ({}, {"capacity": 0}, {"capacity": "all"}, {"capacity": 1 << 60}):
        assert error_of(await resize(shell, body))["param"] == "capacity"
    shell.frontend.drain_error = Unsupported("this engine's KV memory has a fixed size")
    assert (await resize(shell, {"capacity": 8})).status_code == 400
    shell.frontend.drain_error = NotFound("there is no instance 'w'", param="instance_id")
    assert (await resize(shell, {"capacity": 8}, "w")).status_code == 404
    assert not shell.frontend.resized
