"""Policy and decisions over HTTP."""

from typing import Any

import httpx
import pytest

from meshift.schemas.errors import Unavailable
from meshift.schemas.steering import DecisionsReply, DecisionSubject, PolicyReply, RequestExplanation
from tests.unit.frontend.fake_frontend import DECISION
from tests.unit.frontend.http.harness import Shell, error_of


async def patch(shell: Shell, body: Any) -> httpx.Response:
    async with shell.client() as client:
        return await client.patch("/admin/policy", json=body)


async def test_the_policy_is_shown_and_changed(shell: Shell) -> None:
    shown = PolicyReply.model_validate((await shell.get("/admin/policy")).json())
    assert shown.settings["policy"] == "meshift"
    changed = await patch(shell, {"policy": "llumnix", "migration": {"out_below": 4}})
    assert changed.status_code == 200
    assert shell.frontend.steering.settings.policy == "llumnix"
    assert PolicyReply.model_validate(changed.json()).settings["version"] == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"polcy": "llumnix"}, "polcy"),
        ({"policy": "best"}, "policy"),
        ({"version": 3}, "version"),
        ({"scaling": {"instances_min": 0}}, "scaling.instances_min"),
        ({"scaling": {"low": 70}}, "scaling"),
        ({"headroom": {"others_slower_max": -0.1}}, "headroom.others_slower_max"),
        ([], None),
    ],
)
async def test_a_wrong_field_is_named_and_nothing_changes(shell: Shell, body: Any, param: str | None) -> None:
    response = await patch(shell, body)
    assert response.status_code == 400
    assert error_of(response)["param"] == param
    assert shell.frontend.steering.settings.version == 1


async def test_decisions(shell: Shell) -> None:
    response = await shell.get("/admin/decisions?subject=pair&limit=3&request_id=r")
    assert DecisionsReply.model_validate(response.json()).decisions == (DECISION,)
    (asked,) = shell.frontend.steering.asked
    assert (asked.subject, asked.limit, asked.request_id) == (DecisionSubject.PAIR, 3, "r")
    for query, param in (("subject=x", "query.subject"), ("limit=0", "query.limit"), ("limit=257", "query.limit")):
        refused = await shell.get(f"/admin/decisions?{query}")
        assert (refused.status_code, error_of(refused)["param"]) == (400, param)


async def test_explanations(shell: Shell) -> None:
    known = await shell.get("/admin/explain/chatcmpl-1")
    assert RequestExplanation.model_validate(known.json()).dispatches == (DECISION,)
    unknown = await shell.get("/admin/explain/other")
    assert (unknown.status_code, error_of(unknown)["param"]) == (404, "request_id")


async def test_without_a_scheduler(shell: Shell) -> None:
    shell.frontend.steering.error = Unavailable("no scheduler is there")
    for path in ("/admin/policy", "/admin/decisions"):
        assert (await shell.get(path)).status_code == 503
