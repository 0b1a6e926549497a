"""The import names: links in `src/meshift`, and what ends up in a wheel."""

import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "meshift"
FOLDERS = ("backends", "benchmarks", "client", "kernels", "kv_memory", "schemas", "services", "tracing")


def test_there_is_a_link_for_each_folder_and_nothing_else() -> None:
    links = {path.name for path in PACKAGE.iterdir() if path.is_symlink()}
    assert links == set(FOLDERS)
    rest = {path.name for path in PACKAGE.iterdir() if not path.is_symlink()} - {"__pycache__"}
    assert rest == {"__init__.py", "py.typed"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_link_is_relative_and_resolves(folder: str) -> None:
    link = PACKAGE / folder
    assert link.readlink() == Path("..", "..", folder)
    assert link.resolve() == ROOT / folder
    assert link.is_dir()


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_init_in_a_top_folder(folder: str) -> None:
    """One with an `__init__.py` could be imported by its bare name, and shadow a package such as PyPI's `kernels`."""
    assert not (ROOT / folder / "__init__.py").exists()


def test_entry_points_lead_to_this_package() -> None:
    assert entry_points(group="console_scripts", name="meshift")["meshift"].value == "meshift.services.cli.main:main"
    for group in ("sglang.srt.platforms", "sglang.srt.plugins"):
        assert [entry for entry in entry_points(group=group) if entry.value.startswith("meshift.backends.sglang.")]


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in a wheel that is built from a copy of the sources, so that nothing is left in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for folder in (*FOLDERS, "src"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=ignored)
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=copy, check=True, capture_output=True)
    (wheel,) = (copy / "dist").glob("meshift-*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_holds_every_module(wheel_names: set[str]) -> None:
    modules = {
        f"meshift/{path.relative_to(ROOT).as_posix()}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".cpp", ".h", ".json")
    }
    assert modules
    assert modules <= wheel_names


def test_the_wheel_is_typed_and_holds_nothing_else(wheel_names: set[str]) -> None:
    assert {"meshift/__init__.py", "meshift/py.typed"} <= wheel_names
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"meshift"}
