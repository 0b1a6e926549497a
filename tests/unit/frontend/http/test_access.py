"""Keys: who gets in."""

import asyncio
from pathlib import Path

import pytest
from starlette.routing import Route

from meshift.services.frontend.http import AccessError, make_access, read_keys
from meshift.services.frontend.http.access import OPEN_PATHS
from meshift.services.frontend.main import FrontendSettings, access_of, run
from tests.unit.frontend.http.harness import HELLO, MakeShell, Shell, error_of

CLIENT, ADMIN = "sk-client-1", "sk-admin-1"


@pytest.fixture
def locked(make: MakeShell) -> Shell:
    return make(access=make_access([CLIENT, "sk-client-2"], [ADMIN], insecure_no_keys=False))


async def get(shell: Shell, path: str, authorization: str | bytes | None) -> int:
    raw = authorization.encode() if isinstance(authorization, str) else authorization
    headers = [] if raw is None else [(b"authorization", raw)]
    async with shell.client() as client:
        response = await client.get(path, headers=headers)
    if response.status_code == 401:
        error = error_of(response)
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
        assert "x-request-id" in response.headers
        assert authorization is None or CLIENT not in response.text
    return response.status_code


@pytest.mark.parametrize("key", [CLIENT, "sk-client-2"])
async def test_clients_keys_open_the_api_alone(locked: Shell, key: str) -> None:
    assert await get(locked, "/v1/models", f"Bearer {key}") == 200
    assert await get(locked, "/v1/models", f"bearer  {key} ") == 200
    assert await get(locked, "/admin/requests", f"Bearer {key}") == 401


async def test_admin_keys_open_admin_alone(locked: Shell) -> None:
    assert await get(locked, "/admin/requests", f"Bearer {ADMIN}") == 200
    assert await get(locked, "/v1/models", f"Bearer {ADMIN}") == 401


WRONG = [
    None,
    b"",
    b"Bearer",
    b"Bearer ",
    CLIENT.encode(),
    b"Basic " + CLIENT.encode(),
    b"Bearer x",
    "Bearer ä".encode(),
]


@pytest.mark.parametrize("header", WRONG)
async def test_anything_else_opens_nothing(locked: Shell, header: bytes | None) -> None:
    for path in ("/v1/models", "/v1/models/tiny", "/admin/instances", "/admin", "/nothing"):
        assert await get(locked, path, header) == 401


async def test_every_route_but_the_open_ones_needs_a_key(locked: Shell) -> None:
    paths = {route.path for route in locked.app.routes if isinstance(route, Route)}
    assert {"/v1/chat/completions", "/v1/completions", "/admin/instances", "/health"} <= paths
    for path in paths - OPEN_PATHS:
        assert await get(locked, path, None) == 401
    for path in paths & OPEN_PATHS:
        assert await get(locked, path, None) == 200


async def test_nothing_is_generated_without_a_key(locked: Shell) -> None:
    assert (await locked.post()).status_code == 401
    assert not locked.frontend.requests
    assert (await locked.post(HELLO, authorization=f"Bearer {CLIENT}")).status_code == 200


async def test_without_keys_only_the_switch_opens(make: MakeShell) -> None:
    with pytest.raises(AccessError, match="MESHIFT_API_KEYS"):
        make_access([], [ADMIN], insecure_no_keys=False)
    shell = make(access=make_access([], [], insecure_no_keys=True))
    assert [await get(shell, path, None) for path in ("/v1/models", "/admin/requests")] == [200, 200]


async def test_without_admin_keys_nobody_is_an_operator(make: MakeShell) -> None:
    shell = make(access=make_access([CLIENT], [], insecure_no_keys=False))
    for header in (None, "Bearer ", f"Bearer {CLIENT}"):
        assert await get(shell, "/admin/requests", header) == 401


async def test_the_switch_opens_only_what_has_no_keys(make: MakeShell) -> None:
    shell = make(access=make_access([CLIENT], [], insecure_no_keys=True))
    assert await get(shell, "/v1/models", None) == 401
    assert await get(shell, "/admin/requests", None) == 200


def test_a_key_has_one_purpose() -> None:
    with pytest.raises(AccessError, match="both"):
        make_access([CLIENT], [CLIENT], insecure_no_keys=False)


def test_keys_are_read(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nsk-a\n\n  sk-b  \n")
    assert read_keys(" sk-1, sk-2,,", file) == ["sk-1", "sk-2", "sk-a", "sk-b"]
    assert read_keys("", None) == []
    with pytest.raises(AccessError, match="can't read"):
        read_keys("", tmp_path / "absent")
    file.write_text("# nothing\n")
    with pytest.raises(AccessError, match="no keys in"):
        read_keys("", file)


def test_a_frontend_without_keys_does_not_start(caplog: pytest.LogCaptureFixture) -> None:
    assert asyncio.run(run(FrontendSettings())) != 0
    assert "there are no API keys" in caplog.text


def test_a_frontend_s_settings_hide_keys_and_use_them() -> None:
    settings = FrontendSettings.model_validate({"api_keys": CLIENT, "admin_keys": ADMIN})
    assert CLIENT not in repr(settings)
    access = access_of(settings)
    access.check("/v1/models", f"Bearer {CLIENT}")
    access.check("/admin/requests", f"Bearer {ADMIN}")
