"""What operators see and do."""

from typing import Any

import httpx
import pytest

from meshift.schemas.admin import DrainBody, InstanceList, MoveBody, MoveList, OpenRequest, RequestList
from meshift.schemas.errors import MoveDeclined, NotFound, Overloaded, PeerTimeout, Unsupported
from meshift.schemas.identity import FrontendRef, Owner
from meshift.schemas.memory import MemoryBody, MemoryReply
from meshift.schemas.moves import MoveMode, MoveReport, MovesReply
from meshift.schemas.requests import Priority
from tests.unit.frontend.fake_frontend import memory_reply, move_report
from tests.unit.frontend.http.harness import Shell, error_of

OPEN = OpenRequest(
    request_id="chatcmpl-1",
    frontend=FrontendRef("frontend-2", 4),
    model="tiny",
    state="running",
    attempt=2,
    hop=1,
    owner=Owner(instance_id="worker-1", incarnation=3),
    prompt_tokens=7,
    output_tokens=5,
    priority=Priority(scheduling=1, execution=1),
)


async def post(shell: Shell, path: str, body: Any) -> httpx.Response:
    async with shell.client() as client:
        return await client.post(path, json=body)


async def drain(shell: Shell, body: Any, instance_id: str = "worker-1") -> httpx.Response:
    return await post(shell, f"/admin/instances/{instance_id}/drain", body)


async def move(shell: Shell, body: Any, request_id: str = "chatcmpl-1") -> httpx.Response:
    return await post(shell, f"/admin/requests/{request_id}/move", body)


async def test_instances(shell: Shell) -> None:
    response = await shell.get("/admin/instances")
    assert InstanceList.model_validate(response.json()).data == tuple(shell.frontend.operators.known)


async def test_requests(shell: Shell) -> None:
    shell.frontend.operators.open = [OPEN]
    response = await shell.get("/admin/requests")
    listed = RequestList.model_validate(response.json())
    assert (listed.data, listed.total, listed.unanswered) == ((OPEN,), 1, ("frontend-9",))


async def test_moves(shell: Shell) -> None:
    told = MovesReply(owner=Owner("worker-1", 3), running=(move_report(outcome=None),), ended=(move_report(),))
    shell.frontend.operators.told = [told]
    listed = MoveList.model_validate((await shell.get("/admin/moves")).json())
    assert (listed.data, listed.unanswered) == ((told,), ("worker-9",))


@pytest.mark.parametrize(
    ("body", "taken"),
    [
        ({}, DrainBody()),
        ({"deadline_s": 5}, DrainBody(deadline_s=5.0)),
        ({"deadline_s": None, "restart": True}, DrainBody(deadline_s=None, restart=True)),
        ({"force": True}, DrainBody(force=True)),
    ],
)
async def test_drain(shell: Shell, body: Any, taken: DrainBody) -> None:
    response = await drain(shell, body)
    assert response.status_code == 200
    assert response.json()["requests_left"] == 3
    assert shell.frontend.operators.drained == [("worker-1", taken)]


async def test_refused_drains(shell: Shell) -> None:
    operators = shell.frontend.operators
    for body in ({"deadline_s": -1}, {"deadline_s": "soon"}, {"deadline_s": 10**9}):
        assert error_of(await drain(shell, body))["param"] == "deadline_s"
    assert error_of(await drain(shell, {"x": 1}))["param"] == "x"
    operators.error = NotFound("there is no instance 'w'", param="instance_id")
    response = await drain(shell, {}, "w")
    assert (response.status_code, error_of(response)["code"]) == (404, "not_found")
    operators.error = Overloaded("it drains already")
    assert (await drain(shell, {})).status_code == 429
    assert not operators.drained


@pytest.mark.parametrize(
    ("body", "taken"),
    [
        ({}, MoveBody()),
        ({"destination": None, "mode": "recompute"}, MoveBody(mode=MoveMode.RECOMPUTE)),
        ({"destination": "w", "deadline_s": 1, "wait": True}, MoveBody(destination="w", deadline_s=1.0, wait=True)),
    ],
)
async def test_move(shell: Shell, body: Any, taken: MoveBody) -> None:
    response = await move(shell, body)
    assert response.status_code == 200
    assert MoveReport.model_validate(response.json()) == shell.frontend.operators.report
    assert response.json()["figures"]["byte_count"] == 7_000_000
    assert shell.frontend.operators.moved == [("chatcmpl-1", taken)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"destination": ""}, "destination"),
        ({"destination": 3}, "destination"),
        ({"mode": "quickly"}, "mode"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"deadline_s": 10**9}, "deadline_s"),
        ({"wait": "no, thank you"}, "wait"),
        ({"to": "worker-2"}, "to"),
    ],
)
async def test_wrong_fields_are_named(shell: Shell, body: Any, param: str) -> None:
    response = await move(shell, body)
    assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert not shell.frontend.operators.moved


async def test_refused_moves(shell: Shell) -> None:
    operators = shell.frontend.operators
    operators.error = NotFound("there is no open request 'r'", param="request_id")
    response = await move(shell, {})
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (404, "not_found", "request_id")
    operators.error = MoveDeclined("r stays where it is: full", param="destination", refusal="no_room")
    response = await move(shell, {})
    assert response.status_code == 409
    assert error_of(response) == {
        "message": "r stays where it is: full",
        "type": "invalid_request_error",
        "param": "destination",
        "code": "no_room",
    }
    operators.error = PeerTimeout("no answer")
    assert (await move(shell, {})).status_code == 504


async def resize(shell: Shell, body: Any, instance_id: str = "worker-1") -> httpx.Response:
    async with shell.client() as client:
        return await client.post(f"/admin/instances/{instance_id}/memory", json=body)


async def test_memory(shell: Shell) -> None:
    name = shell.frontend.operators.known[0].load.owner.instance_id
    response = await shell.get(f"/admin/instances/{name}/memory")
    assert MemoryReply.model_validate(response.json()) == memory_reply(name, 1024)
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
    assert shell.frontend.operators.resized == [("worker-1", asked)]


async def test_refused_capacities(shell: Shell) -> None:
    for body in ({}, {"capacity": 0}, {"capacity": "all"}, {"capacity": 1 << 60}):
        assert error_of(await resize(shell, body))["param"] == "capacity"
    shell.frontend.operators.error = Unsupported("this engine's KV memory has a fixed size")
    assert (await resize(shell, {"capacity": 8})).status_code == 400
    shell.frontend.operators.error = NotFound("there is no instance 'w'", param="instance_id")
    assert (await resize(shell, {"capacity": 8}, "w")).status_code == 404
    assert not shell.frontend.operators.resized
