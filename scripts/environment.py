"""Prepares `.venv/` and the chat model of a checkout: what `make setup` runs. Standard library only.

The packages of `requirements.lock` are installed once for each lock file and interpreter into a cache
(`$MESHIFT_CACHE`, or `~/.cache/meshift`). The `.venv/` of a checkout is thin: a path file adds the cached packages,
its commands start the checkout's own interpreter, and `meshift` itself is installed there, editable.
See docs/decisions/0001-packaging-and-environments.md.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PYTHON_WANTED = (3, 11)
CACHED_ENVIRONMENTS_MAX = 2
HEARTBEAT_S = 10.0
INSTALL_ATTEMPTS_MAX = 2
LOG_TAIL_LINES = 15
STAMP_NAME = ".meshift-stamp"
COMPLETE_NAME = ".meshift-complete"
COMPILED_NAME = ".meshift-compiled"
NO_BYTECODE_VARIABLE = "PYTHONDONTWRITEBYTECODE"
STARTED_MODULES = (
    "meshift.services.cli.up",
    "meshift.services.frontend.main",
    "meshift.services.scheduler.main",
    "meshift.services.worker.main",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
)
"""What processes of a mesh import, and with it all that those import."""
PATH_FILE_NAME = "_meshift_packages.pth"
LOCK_NAME = "requirements.lock"
MODEL_NAME = "smollm2"

STARTED_S = time.monotonic()


class SetupError(Exception):
    """Set-up can't go on; the message says what to do."""


def say(text: str) -> None:
    """One progress line, with the time since the start."""
    print(f"[{time.monotonic() - STARTED_S:6.1f} s] {text}", flush=True)


@dataclass(frozen=True)
class Checkout:
    """A working copy of the repository, and the cache that it uses."""

    root: Path
    cache: Path

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    @property
    def packages(self) -> Path:
        """The cached environment that holds the packages of the lock file."""
        return self.cache / "environments" / packages_key(self.root / LOCK_NAME)

    @property
    def lock(self) -> Path:
        """Held while this checkout is being set up."""
        return self.cache / "checkouts" / f"{digest(str(self.root).encode())}.lock"

    @property
    def model(self) -> Path:
        return Path(os.environ.get("MESHIFT_MODELS") or self.root / ".models") / MODEL_NAME

    def stamp(self) -> str:
        """What `.venv/` depends on; it is rebuilt when this changes."""
        return digest(
            str(self.root).encode(),
            str(self.packages).encode(),
            (self.root / "pyproject.toml").read_bytes(),
            Path(__file__).read_bytes(),
        )


def digest(*parts: bytes) -> str:
    """A short hash of all parts."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(hashlib.sha256(part).digest())
    return whole.hexdigest()[:16]


def packages_key(lock_file: Path) -> str:
    """Names a cached environment: same lock file, same interpreter, same packages."""
    interpreter = (sys.version, platform.machine(), os.path.realpath(sys.base_prefix))
    return digest(lock_file.read_bytes(), repr(interpreter).encode())


def is_current(checkout: Checkout) -> bool:
    """Whether `.venv/` and what it leans on are whole and up to date."""
    stamp = checkout.venv / STAMP_NAME
    with contextlib.suppress(OSError):
        return (
            stamp.read_text() == checkout.stamp()
            and checkout.python.exists()
            and (checkout.packages / COMPLETE_NAME).exists()
        )
    return False


def set_up(checkout: Checkout, *, with_model: bool) -> None:
    """Bring the checkout to where every make target works. Quick when nothing is to be done."""
    with locked(checkout.lock, "this checkout"):
        if is_current(checkout):
            os.utime(checkout.packages / COMPLETE_NAME)
            say("environment: up to date")
        else:
            build_packages(checkout)
            build_venv(checkout)
            compile_imports(checkout)
            prune(checkout)
        if with_model and not checkout.model.exists():
            prepare_model(checkout)


@contextlib.contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold a lock file; another process that has it is waited for, and that is said."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another set-up of {what}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


# ---- the packages, in the cache ----


def build_packages(checkout: Checkout) -> None:
    """Install the lock file's packages into the cache, unless they are there."""
    folder = checkout.packages
    with locked(folder.with_suffix(".lock"), "the package cache"):
        if (folder / COMPLETE_NAME).exists():
            say(f"packages: found in {folder}")
            return
        count = len(locked_requirements(checkout.root / LOCK_NAME))
        say(f"packages: installing {count} of {LOCK_NAME} into {folder} (once for each lock file; minutes)")
        if folder.exists():
            shutil.rmtree(folder)
        create_venv(folder, with_pip=True)
        install_lock(checkout, count)
        (folder / COMPLETE_NAME).write_text(f"{count} packages\n")
        say("packages: installed")


def locked_requirements(lock_file: Path) -> list[str]:
    """The pins of a lock file."""
    lines = (line.split("#")[0].strip() for line in lock_file.read_text().splitlines())
    return [line for line in lines if line]


def create_venv(folder: Path, *, with_pip: bool) -> None:
    """An empty virtual environment of this interpreter."""
    command = [sys.executable, "-m", "venv", str(folder)]
    done = subprocess.run(
        command if with_pip else [*command, "--without-pip"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        hint = "On Debian and Ubuntu: apt-get install python3.11-venv."
        raise SetupError(f"python -m venv failed. {hint}\n{done.stdout}{done.stderr}")


def install_lock(checkout: Checkout, count: int) -> None:
    """Run pip on the lock file; a registry that hiccups gets one more try."""
    folder = checkout.packages
    command = [
        str(folder / "bin" / "python"), "-m", "pip", "install", "--no-deps", "--only-binary", ":all:",
        "--no-compile", "--no-input", "--progress-bar", "off", "--disable-pip-version-check",
        "-r", str(checkout.root / LOCK_NAME),
    ]  # fmt: skip
    log = folder.with_suffix(".log")
    for attempt in range(1, INSTALL_ATTEMPTS_MAX + 1):
        if run_pip(command, log, folder, count) == 0:
            return
        if attempt < INSTALL_ATTEMPTS_MAX:
            say("packages: pip failed; trying once more")
    raise SetupError(f"pip failed; the end of {log}:\n{tail(log)}")


def run_pip(command: Sequence[str], log: Path, folder: Path, count: int) -> int:
    """Run pip with its output in `log`, saying now and then how far it is. Returns its exit status."""
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(HEARTBEAT_S)
                say(f"packages: {install_progress(log, folder, count)}")
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()


def install_progress(log: Path, folder: Path, count: int) -> str:
    """How far pip is, from its log and from what lies in the environment."""
    text = log.read_text(errors="replace")
    if "Installing collected packages" in text:
        installed = sum(1 for _ in folder.glob("lib/python*/site-packages/*.dist-info"))
        return f"installed {installed} of {count}"
    return f"fetched {text.count('Collecting ')} of {count}"


def prune(checkout: Checkout) -> None:
    """Remove the cached environments that have been unused for longest, beyond the newest few."""
    markers = (checkout.cache / "environments").glob(f"*/{COMPLETE_NAME}")
    newest_first = sorted(markers, key=lambda marker: marker.stat().st_mtime, reverse=True)
    for marker in newest_first[CACHED_ENVIRONMENTS_MAX:]:
        say(f"packages: removing the older environment {marker.parent}")
        marker.unlink()
        shutil.rmtree(marker.parent, ignore_errors=True)
        marker.parent.with_suffix(".log").unlink(missing_ok=True)


# ---- the checkout's own environment ----


def build_venv(checkout: Checkout) -> None:
    """Make `.venv/` anew: thin, on top of the cached packages, with this checkout's meshift in it."""
    say(f"environment: making {checkout.venv}")
    remove(checkout.venv)
    create_venv(checkout.venv, with_pip=False)
    site_packages(checkout.venv).joinpath(PATH_FILE_NAME).write_text(
        f"import site; site.addsitedir({str(site_packages(checkout.packages))!r})\n"
    )
    for command in sorted((checkout.packages / "bin").iterdir()):
        link_command(command, checkout.venv / "bin" / command.name, checkout)
    install_project(checkout)
    (checkout.venv / STAMP_NAME).write_text(checkout.stamp())
    say("environment: ready")


def remove(path: Path) -> None:
    """Remove a folder or a link to one."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def site_packages(venv: Path) -> Path:
    """Where a virtual environment keeps its packages."""
    return venv / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def link_command(source: Path, target: Path, checkout: Checkout) -> None:
    """Give the checkout a command of the cached environment: a script starts the checkout's interpreter, so that
    it sees the checkout's meshift; a program is linked. What the checkout has already (its python) stays."""
    if target.exists() or source.name.lower().startswith("activate"):
        return
    content = source.read_bytes()
    if not content.startswith(b"#!"):
        target.symlink_to(source)
        return
    body = content.split(b"\n", 1)[1]
    if body.startswith(b"'''exec'"):
        body = body.split(b"\n", 2)[2]
    # The detour over `sh` works with any length of path, and with spaces in it.
    start = f"#!/bin/sh\n'''exec' \"{checkout.python}\" \"$0\" \"$@\"\n' '''\n"
    target.write_bytes(start.encode() + body)
    target.chmod(0o755)


def install_project(checkout: Checkout) -> None:
    """Install the checkout itself, editable; nothing is fetched."""
    command = [
        str(checkout.python), "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index",
        "--no-input", "--disable-pip-version-check", "--editable", str(checkout.root),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SetupError(f"installing meshift failed:\n{done.stdout}{done.stderr}")


def compile_imports(checkout: Checkout) -> None:
    """Have Python keep the bytecode of what a mesh imports, once for each cached environment: pip doesn't make it here,
    and where users or images forbid Python to write any, each rank would compile SGLang anew, in half a minute."""
    marker = checkout.packages / COMPILED_NAME
    with locked(checkout.packages.with_suffix(".lock"), "the package cache"):
        if marker.exists():
            return
        say("packages: compiling what a mesh imports (once; a minute)")
        allowed = {name: value for name, value in os.environ.items() if name != NO_BYTECODE_VARIABLE}
        for module in STARTED_MODULES:
            command = [str(checkout.python), "-c", f"import {module}"]
            done = subprocess.run(command, env=allowed, capture_output=True, text=True, check=False)
            if done.returncode:
                # It would fail later too, and say it better there.
                say(f"packages: {module} can't be imported: {done.stderr.strip().splitlines()[-1:]}")
        marker.touch()


def prepare_model(checkout: Checkout) -> None:
    """Convert the small chat model; the command says what it does."""
    say(f"model: preparing {MODEL_NAME} at {checkout.model}")
    command = [str(checkout.venv / "bin" / "meshift"), "model", "prepare", MODEL_NAME]
    if subprocess.run(command, cwd=checkout.root, check=False).returncode:
        raise SetupError("the model could not be prepared")
    say("model: ready")


def tail(log: Path) -> str:
    """The last lines of a log file."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])


def check_interpreter() -> None:
    """The lock file holds for one minor version only."""
    if sys.version_info[:2] != PYTHON_WANTED:
        wanted = ".".join(map(str, PYTHON_WANTED))
        raise SetupError(
            f"the lock file is for Python {wanted}; {sys.executable} is {platform.python_version()}. "
            f"Name another: make PYTHON=/path/to/python{wanted} ..."
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Prepare .venv/ and the chat model of this checkout.")
    parser.add_argument("--no-model", action="store_true", help="leave the model out")
    arguments = parser.parse_args()
    cache = Path(os.environ.get("MESHIFT_CACHE") or Path.home() / ".cache" / "meshift").resolve()
    checkout = Checkout(Path(__file__).resolve().parent.parent, cache)
    try:
        check_interpreter()
        set_up(checkout, with_model=not arguments.no_model)
    except SetupError as error:
        print(f"set-up failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
