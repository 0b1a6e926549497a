"""Building the kernels: once, whole, and with a clear word where it can't be done."""

import multiprocessing
from pathlib import Path

import pytest

pytest.importorskip("torch")

from meshift.kernels.cpu import build
from meshift.kernels.cpu.build import KernelUnavailable, ensure_library

COUNTING_COMPILER = """#!/bin/sh
echo run >> "$LOG"
while [ "$1" != -o ]; do shift; done
echo library > "$2"
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that counts its runs."""
    path = tmp_path / "compiler"
    path.write_text(COUNTING_COMPILER)
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    return path


def runs(tmp_path: Path) -> int:
    return len((tmp_path / "log").read_text().splitlines())


def test_builds_once(tmp_path: Path, compiler: Path) -> None:
    path = ensure_library(tmp_path / "cache")
    assert path.read_text() == "library\n"
    once = runs(tmp_path)
    assert ensure_library(tmp_path / "cache") == path
    assert runs(tmp_path) == once
    assert sorted(left.name for left in path.parent.iterdir()) == sorted([path.name, "lock"])


def test_processes_that_ask_at_once_get_one_build(tmp_path: Path, compiler: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=ensure_library, args=(tmp_path / "cache",)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert runs(tmp_path) == len(build.VARIANTS) + 5


def test_other_flags_or_sources_are_another_library(
    tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ensure_library(tmp_path / "cache")
    monkeypatch.setattr(build, "COMMON_FLAGS", ("-O1",))
    second = ensure_library(tmp_path / "cache")
    sources = tmp_path / "sources"
    sources.mkdir()
    for name in build.SOURCE_NAMES:
        (sources / name).write_text("int main;")
    monkeypatch.setattr(build, "SOURCE_FOLDER", sources)
    third = ensure_library(tmp_path / "cache")
    assert len({first.parent, second.parent, third.parent}) == 3


def test_a_compiler_that_fails(tmp_path: Path, compiler: Path) -> None:
    compiler.write_text("#!/bin/sh\necho wrong >&2; exit 1\n")
    with pytest.raises(KernelUnavailable, match="wrong"):
        ensure_library(tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.so"))
    assert not list((tmp_path / "cache").rglob("build-*"))


def test_without_a_compiler(tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ensure_library(tmp_path / "cache")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert ensure_library(tmp_path / "cache") == path
    with pytest.raises(KernelUnavailable, match="no C"):
        ensure_library(tmp_path / "empty")


def test_a_cache_that_cannot_be_written(tmp_path: Path, compiler: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(KernelUnavailable, match="can't be kept"):
        ensure_library(tmp_path / "cache")


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHIFT_CACHE", str(tmp_path))
    assert build.cache_folder() == tmp_path / "kernels"
