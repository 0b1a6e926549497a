"""Flags and environment variables of any settings model."""

from typing import Literal

import pytest
from pydantic import BaseModel, Field

from meshift.services.cli.errors import CommandError
from meshift.services.cli.settings import parse_settings
from meshift.services.cli.up import UpSettings
from meshift.services.scheduler.main import SchedulerSettings
from meshift.services.worker.main import WorkerSettings


class Example(BaseModel):
    """An example of settings."""

    page_size: int = Field(16, ge=1, description="tokens a page")
    engine: Literal["sglang", "sim"] = Field("sglang", description="which engine")
    model_name: str | None = Field(None, description="its name")
    debug: bool = Field(False, description="check more")


def test_defaults() -> None:
    assert parse_settings(Example, "meshift example", []).model_dump() == Example().model_dump()


def test_flags_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHIFT_PAGE_SIZE", "32")
    monkeypatch.setenv("MESHIFT_MODEL_NAME", "m")
    monkeypatch.setenv("MESHIFT_UNRELATED", "x")
    settings = parse_settings(Example, "meshift example", ["--engine", "sim", "--debug"])
    assert isinstance(settings, Example)
    assert settings.model_dump() == {"page_size": 32, "engine": "sim", "model_name": "m", "debug": True}
    assert parse_settings(Example, "meshift example", ["--page-size=8"]).page_size == 8


@pytest.mark.parametrize("arguments", [["--page-size", "0"], ["--page-size", "x"], ["--engine", "gpu"]])
def test_a_refused_value_names_flag_and_variable(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        parse_settings(Example, "meshift example", arguments)
    except CommandError as error:
        text, status = str(error), error.exit_status
    except SystemExit as end:
        text, status = capsys.readouterr().err, int(end.code or 0)
    assert status == 2
    assert arguments[0] in text
    assert "pydantic.dev" not in text


def test_a_refused_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHIFT_PAGE_SIZE", "many")
    with pytest.raises(CommandError, match=r"--page-size \(MESHIFT_PAGE_SIZE\): .*integer"):
        parse_settings(Example, "meshift example", [])


def test_an_unknown_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_settings(Example, "meshift example", ["--colour"])
    assert end.value.code == 2
    assert "meshift example: error: unrecognized arguments: --colour" in capsys.readouterr().err


@pytest.mark.parametrize("model", [UpSettings, WorkerSettings, SchedulerSettings])
def test_every_setting_is_described(model: type[BaseModel]) -> None:
    assert [name for name, field in model.model_fields.items() if not field.description] == []
