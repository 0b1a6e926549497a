"""Model folders appear whole or not at all, and once."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from meshift.backends.sglang import models

RECIPE = {"model": "m", "version": 1}


def builder(built: list[Path], text: str = "weights") -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        assert os.environ["HF_HUB_OFFLINE"] == "1"
        (folder / "model.safetensors").write_text(text)
        (folder / "model.safetensors").chmod(0o600)
        built.append(folder)

    return build


def test_built_once(tmp_path: Path) -> None:
    built: list[Path] = []
    lines: list[str] = []
    target = tmp_path / "models" / "m"
    for _ in range(2):
        assert models._build_once(target, RECIPE, builder(built), lines.append) == target
    assert len(built) == 1
    assert len(lines) == 1
    assert [path.name for path in target.parent.iterdir()] == ["m"]
    assert (target / "model.safetensors").stat().st_mode & 0o777 == 0o644
    assert target.stat().st_mode & 0o777 == 0o755


def test_another_recipe_replaces_it(tmp_path: Path) -> None:
    target = tmp_path / "m"
    models._build_once(target, RECIPE, builder([], "old"), print)
    models._build_once(target, RECIPE | {"version": 2}, builder([], "new"), print)
    assert (target / "model.safetensors").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_half_made_folder_is_no_model(tmp_path: Path) -> None:
    target = tmp_path / "m"
    target.mkdir()
    (target / "model.safetensors").write_text("half")
    models._build_once(target, RECIPE, builder([]), print)
    assert (target / "model.safetensors").read_text() == "weights"


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    def fail(folder: Path) -> None:
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        models._build_once(tmp_path / "m", RECIPE, fail, print)
    assert list(tmp_path.iterdir()) == []
    assert "HF_HUB_OFFLINE" not in os.environ


def test_two_that_build_at_once(tmp_path: Path) -> None:
    """The later one takes what the earlier one made."""
    target = tmp_path / "m"

    def overtaken(folder: Path) -> None:
        models._build_once(target, RECIPE, builder([], "earlier"), print)
        builder([], "later")(folder)

    assert models._build_once(target, RECIPE, overtaken, print) == target
    assert (target / "model.safetensors").read_text() == "earlier"
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_SMOLLM2_PACKAGE", "no_such_package_anywhere")
    with pytest.raises(models.ModelUnavailable, match="pip install"):
        models.prepare_smollm2(tmp_path / "m", print)
