"""Reconfigurations over REST."""

from typing import Any

import pytest

from meshift.schemas.errors import LayoutDeclined, NotFound, Unavailable
from meshift.schemas.layouts import CommitMode, LayoutFlags
from meshift.schemas.reconfiguring import ReconfigurationsReply, ReconfigureBody, ReconfigureReport
from tests.unit.frontend.http.harness import Shell, error_of

PATH = "/admin/instances/worker-1/reconfigure"


async def post(shell: Shell, body: Any) -> Any:
    async with shell.client() as client:
        return await client.post(PATH, json=body)


@pytest.mark.parametrize(
    ("body", "taken"),
    [
        ({"layers": [20, 10]}, ReconfigureBody(layers=(20, 10))),
        (
            {"layers": [30, 0], "dry_run": True, "commit": "lag", "flags": {"no_patch": True}, "wait": True},
            ReconfigureBody(
                layers=(30, 0), dry_run=True, commit=CommitMode.LAG, flags=LayoutFlags(no_patch=True), wait=True
            ),
        ),
    ],
)
async def test_what_is_ordered(shell: Shell, body: Any, taken: ReconfigureBody) -> None:
    response = await post(shell, body)
    assert ReconfigureReport.model_validate(response.json()) == shell.frontend.reconfiguring.report
    assert shell.frontend.reconfiguring.asked == [("worker-1", taken)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "layers"),
        ({"layers": []}, "layers"),
        ({"layers": [-1, 2]}, "layers.0"),
        ({"layers": "20,10"}, "layers"),
        ({"layers": [20, 10], "commit": "jump"}, "commit"),
        ({"layers": [20, 10], "flags": {"no_luck": True}}, "flags.no_luck"),
        ({"layers": [20, 10], "tau_tokens": 0}, "tau_tokens"),
        ({"layers": [20, 10], "deadline_s": -1}, "deadline_s"),
        ({"layers": [20, 10], "bytes_per_s": 0}, "bytes_per_s"),
        ({"layers": [20, 10], "split": 1}, "split"),
    ],
)
async def test_bad_fields_are_named(shell: Shell, body: Any, param: str) -> None:
    response = await post(shell, body)
    assert response.status_code == 400
    assert error_of(response)["param"] == param
    assert shell.frontend.reconfiguring.asked == []


async def test_what_is_declined(shell: Shell) -> None:
    shell.frontend.reconfiguring.error = LayoutDeclined("it stays", param="layers", refusal="no_memory")
    response = await post(shell, {"layers": [20, 10]})
    assert response.status_code == 409
    assert (error_of(response)["code"], error_of(response)["param"]) == ("no_memory", "layers")


async def test_progress_and_a_cancel(shell: Shell) -> None:
    for path in (PATH, "/admin/reconfigurations"):
        listed = ReconfigurationsReply.model_validate((await shell.get(path)).json())
        assert listed.running == (shell.frontend.reconfiguring.report,)
    async with shell.client() as client:
        response = await client.delete(PATH)
    assert response.status_code == 200
    assert shell.frontend.reconfiguring.cancelled == ["worker-1"]


@pytest.mark.parametrize(("error", "status"), [(NotFound("no change"), 404), (Unavailable("no coordinator"), 503)])
async def test_trouble(shell: Shell, error: Any, status: int) -> None:
    shell.frontend.reconfiguring.error = error
    async with shell.client() as client:
        assert (await client.delete(PATH)).status_code == status
        assert (await client.get(PATH)).status_code == status
