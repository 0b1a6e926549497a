"""When `meshift up` serves without keys."""

from pathlib import Path

import pytest

from meshift.services.cli.errors import CommandError
from meshift.services.cli.main import main
from meshift.services.cli.up import KEY_VARIABLES, Up, UpSettings, is_loopback, no_keys_needed
from meshift.services.launcher.mesh import FRONTEND, MeshPlan


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEY_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_on_loopback_it_does(host: str) -> None:
    assert is_loopback(host)
    assert no_keys_needed(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_elsewhere_it_needs_keys(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CommandError, match="MESHIFT_API_KEYS"):
        no_keys_needed(host)
    monkeypatch.setenv("MESHIFT_API_KEYS", "sk-1")
    assert not no_keys_needed(host)


def test_it_says_so_before_it_starts_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--host", "0.0.0.0", "--state-dir", str(tmp_path), "--engine", "sim"]) == 1
    assert "can be reached from elsewhere" in capsys.readouterr().err


@pytest.mark.parametrize("without", [False, True])
def test_the_frontend_is_told(without: bool, tmp_path: Path) -> None:
    plan = MeshPlan("nats://x", 1, {}, "127.0.0.1", 8000, tmp_path, 1.0, insecure_no_keys=without)
    assert plan.specs()[FRONTEND].settings.get("insecure_no_keys", False) is without


def test_workers_get_stacking_and_attention_if_they_are_said(tmp_path: Path) -> None:
    def given(**fields: object) -> dict[str, object]:
        settings = UpSettings.model_validate(fields)
        plan = Up(settings, tmp_path, tmp_path / "m", 8000, without_keys=True)._plan("nats://x")
        return dict(plan.specs()["worker-1"].settings)

    chosen = given(layers_per_group=4, attention_backend="torch_native")
    assert (chosen["layers_per_group"], chosen["attention_backend"]) == (4, "torch_native")
    assert not {"layers_per_group", "attention_backend"} & given().keys()
