"""Models, health and readiness."""

from tests.unit.frontend.fake_frontend import FakeFrontend, model_info
from tests.unit.frontend.http.harness import CREATED, MakeShell, Shell, error_of


async def test_models_are_listed(make: MakeShell) -> None:
    models = [model_info("tiny", path="/m"), model_info("org/Big-1", path="/m", context_tokens_max=4096)]
    shell = make(frontend=FakeFrontend(models))
    assert (await shell.get("/v1/models")).json() == {
        "object": "list",
        "data": [
            {"id": "tiny", "object": "model", "created": CREATED, "owned_by": "meshift", "max_model_len": 512},
            {"id": "org/Big-1", "object": "model", "created": CREATED, "owned_by": "meshift", "max_model_len": 4096},
        ],
    }
    assert (await shell.get("/v1/models/org/Big-1")).json()["id"] == "org/Big-1"


async def test_no_models_is_an_empty_list(make: MakeShell) -> None:
    shell = make(frontend=FakeFrontend([]))
    assert (await shell.get("/v1/models")).json()["data"] == []


async def test_an_unknown_model_is_not_found(shell: Shell) -> None:
    response = await shell.get("/v1/models/absent")
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"


async def test_health_is_about_the_process_alone(shell: Shell) -> None:
    shell.frontend.is_ready = False
    response = await shell.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


async def test_readiness(shell: Shell) -> None:
    response = await shell.get("/ready")
    assert response.status_code == 200
    assert response.json() == {"status": "ready", "scheduler": "ok", "instances": 1}
    shell.frontend.has_scheduler = False
    response = await shell.get("/ready")
    assert (response.status_code, response.json()["scheduler"]) == (200, "bypass")
    shell.frontend.is_ready = False
    response = await shell.get("/ready")
    assert response.status_code == 503
    assert response.json() == {
        "status": "not_ready",
        "reason": "no live instance takes requests",
        "scheduler": "bypass",
        "instances": 1,
    }
