"""`meshift model`, and how `up` finds a model."""

import json
from pathlib import Path

import pytest

from meshift.services.cli import model
from meshift.services.cli.errors import CommandError
from meshift.services.cli.main import main


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "models"
    monkeypatch.setenv("MESHIFT_MODELS", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def make(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 30}))
    return folder


def test_list(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "list"]) == 1
    assert f"no model in {models}" in capsys.readouterr().out
    make(models / "tiny")
    make(models / ".tiny-half-made")
    assert main(["model", "list"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split() == ["tiny", "llama,", "30", "layers", str(models / "tiny")]


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model"]) == 2
    assert main(["model", "remove"]) == 2
    assert "usage: meshift model prepare" in capsys.readouterr().out


def test_only_the_small_model_is_prepared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "prepare", "llama-70b"]) == 1
    assert "meshift model: 'llama-70b' can't be prepared, only smollm2" in capsys.readouterr().err


def test_a_model_by_path_and_by_name(models: Path, tmp_path: Path) -> None:
    by_path = make(tmp_path / "elsewhere" / "mine")
    by_name = make(models / "tiny")
    assert model.resolve_model(str(by_path)) == by_path
    assert model.resolve_model("elsewhere/mine") == by_path
    assert model.resolve_model("tiny") == by_name
    with pytest.raises(CommandError, match=r"no model 'huge'.*\(there is: tiny\)"):
        model.resolve_model("huge")


def test_the_small_model_is_made_when_it_is_missing(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(model, "prepare_apart", made.append)
    assert model.resolve_model("smollm2") == models / "smollm2"
    assert made == ["smollm2"]
    make(models / "smollm2")
    model.resolve_model("smollm2")
    assert made == ["smollm2"]
