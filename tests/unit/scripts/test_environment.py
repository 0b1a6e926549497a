"""What `make setup` decides, on folders of our own; no package is installed."""

import os
import sys
import time
from pathlib import Path
from queue import Queue
from threading import Thread

import pytest

from scripts import environment
from scripts.environment import COMPLETE_NAME, LOCK_NAME, STAMP_NAME, Checkout, SetupError


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root = tmp_path / "checkout"
    root.mkdir()
    (root / LOCK_NAME).write_text("# comment\nalpha==1 # why\n\nbeta==2\n")
    (root / "pyproject.toml").write_text("[project]\n")
    return Checkout(root, tmp_path / "cache")


def finish(checkout: Checkout) -> None:
    """Leave what a set-up that has ended leaves."""
    checkout.packages.mkdir(parents=True)
    (checkout.packages / COMPLETE_NAME).touch()
    checkout.python.parent.mkdir(parents=True)
    checkout.python.touch()
    (checkout.venv / STAMP_NAME).write_text(checkout.stamp())


def test_current_until_something_changes(checkout: Checkout) -> None:
    assert not environment.is_current(checkout)
    finish(checkout)
    assert environment.is_current(checkout)
    (checkout.root / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert not environment.is_current(checkout)


@pytest.mark.parametrize("missing", ["venv/bin/python", f"venv/{STAMP_NAME}", f"packages/{COMPLETE_NAME}"])
def test_a_partial_environment_is_not_current(checkout: Checkout, missing: str) -> None:
    finish(checkout)
    room, _, rest = missing.partition("/")
    (getattr(checkout, room) / rest).unlink()
    assert not environment.is_current(checkout)


def test_another_lock_file_is_another_cached_environment(checkout: Checkout) -> None:
    before = checkout.packages
    (checkout.root / LOCK_NAME).write_text("alpha==2\n")
    assert checkout.packages != before
    assert checkout.packages.parent == before.parent


def test_packages_are_installed_once_and_after_a_crash_anew(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: list[int] = []
    monkeypatch.setattr(environment, "create_venv", lambda folder, with_pip: folder.mkdir())
    monkeypatch.setattr(environment, "install_lock", lambda _, count: installed.append(count))
    checkout.packages.mkdir(parents=True)
    (checkout.packages / "left by a set-up that was killed").touch()
    environment.build_packages(checkout)
    environment.build_packages(checkout)
    assert installed == [2]
    assert [path.name for path in checkout.packages.iterdir()] == [COMPLETE_NAME]


def test_a_failed_install_is_not_taken_for_a_finished_one(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(checkout: Checkout, count: int) -> None:
        raise SetupError("no network")

    monkeypatch.setattr(environment, "create_venv", lambda folder, with_pip: folder.mkdir())
    monkeypatch.setattr(environment, "install_lock", fail)
    with pytest.raises(SetupError):
        environment.build_packages(checkout)
    assert not (checkout.packages / COMPLETE_NAME).exists()


def test_of_two_set_ups_the_second_waits_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    said: Queue[str] = Queue()
    monkeypatch.setattr(environment, "say", said.put)

    def second() -> None:
        with environment.locked(tmp_path / "lock", "this checkout"):
            order.append("second")

    with environment.locked(tmp_path / "lock", "this checkout"):
        thread = Thread(target=second)
        thread.start()
        assert said.get(timeout=10) == "waiting for another set-up of this checkout"
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_bytecode_is_kept_once_even_where_python_must_not_write_any(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    checkout.packages.mkdir(parents=True)
    checkout.python.parent.mkdir(parents=True)
    checkout.python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    checkout.python.chmod(0o755)
    (tmp_path / "alpha.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(environment.NO_BYTECODE_VARIABLE, "1")
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    monkeypatch.setattr(environment, "STARTED_MODULES", ("no_such_module_of_ours", "alpha"))
    environment.compile_imports(checkout)
    assert len(list(tmp_path.glob("__pycache__/alpha.*.pyc"))) == 1
    assert "no_such_module_of_ours can't be imported" in capsys.readouterr().out
    environment.compile_imports(checkout)
    assert capsys.readouterr().out == ""


def test_requirements_without_comments(checkout: Checkout) -> None:
    assert environment.locked_requirements(checkout.root / LOCK_NAME) == ["alpha==1", "beta==2"]


def test_a_finished_set_up_is_quick(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    finish(checkout)
    for name in ("build_packages", "build_venv", "prepare_model"):
        monkeypatch.setattr(environment, name, lambda *_: pytest.fail("nothing was to be done"))
    environment.set_up(checkout, with_model=False)


def test_scripts_start_the_interpreter_of_the_checkout(checkout: Checkout) -> None:
    cached, own = checkout.packages / "bin", checkout.venv / "bin"
    cached.mkdir(parents=True)
    own.mkdir(parents=True)
    (cached / "plain").write_text(f"#!{cached}/python\nprint('plain')\n")
    (cached / "long").write_text(f"#!/bin/sh\n'''exec' {cached}/python \"$0\" \"$@\"\n' '''\nprint('long')\n")
    (cached / "program").write_bytes(b"\x7fELF")
    (cached / "activate").write_text("# for a shell")
    (own / "python").symlink_to(sys.executable)
    for command in sorted(cached.iterdir()):
        environment.link_command(command, own / command.name, checkout)
    assert not (own / "activate").exists()
    assert (own / "program").readlink() == cached / "program"
    for name in ("plain", "long"):
        assert os.access(own / name, os.X_OK)
        assert os.popen(str(own / name)).read() == f"{name}\n"


def test_the_least_used_environments_go(checkout: Checkout) -> None:
    folder = checkout.cache / "environments"
    for age, name in enumerate(["newest", "middle", "oldest"]):
        (folder / name).mkdir(parents=True)
        marker = folder / name / COMPLETE_NAME
        marker.touch()
        os.utime(marker, (time.time() - age * 1000,) * 2)
    (folder / "being-built").mkdir()
    environment.prune(checkout)
    assert {path.name for path in folder.iterdir()} == {"newest", "middle", "being-built"}


def test_progress_is_read_from_pip(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("Collecting alpha==1\n  Downloading alpha\nCollecting beta==2\n")
    assert environment.install_progress(log, tmp_path, 3) == "fetched 2 of 3"
    (tmp_path / "lib" / "python3.11" / "site-packages" / "alpha-1.dist-info").mkdir(parents=True)
    log.write_text(log.read_text() + "Installing collected packages: alpha, beta\n")
    assert environment.install_progress(log, tmp_path, 3) == "installed 1 of 3"


def test_pip_is_tried_twice_and_then_explained(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fail(command: list[str], log: Path, folder: Path, count: int) -> int:
        calls.append(command)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("no such version\n")
        return 1

    monkeypatch.setattr(environment, "run_pip", fail)
    with pytest.raises(SetupError, match="no such version"):
        environment.install_lock(checkout, 2)
    assert len(calls) == environment.INSTALL_ATTEMPTS_MAX


def test_another_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "PYTHON_WANTED", (3, 99))
    with pytest.raises(SetupError, match=r"make PYTHON=/path/to/python3\.99"):
        environment.check_interpreter()
