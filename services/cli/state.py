"""The state file of a mesh that `meshift up` runs, by which `status`, `chat` and `drain` find it."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from meshift.services.cli.errors import CommandError

STATE_NAME = "cluster.json"
LOCK_NAME = "up.lock"


class ClusterState(BaseModel):
    """A running mesh."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pid: int
    """Of `meshift up`."""
    pid_start: int
    """When that process began, in the kernel's ticks since boot: a later process of the same pid is another one."""
    url: str
    nats_url: str
    model: str
    pids: dict[str, int]
    """Instance -> process."""
    metrics: dict[str, str] = {}
    """Instance -> URL of its metrics, where it shows any."""


def process_start(pid: int) -> int | None:
    """When a process began, in ticks since boot; None if there is none."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return None
    # The command's name, in parentheses, may hold spaces; the 22nd field of all is the 20th after it.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state == "Z" else int(fields[18])


def write_state(folder: Path, state: ClusterState) -> None:
    """Replace the state file at once as a whole."""
    draft = folder / f"{STATE_NAME}.new"
    draft.write_text(state.model_dump_json(indent=1) + "\n")
    draft.replace(folder / STATE_NAME)


def read_state(folder: Path) -> ClusterState | None:
    """The mesh that runs from here; None if none does. A file left by a killed one counts as none."""
    try:
        state = ClusterState.model_validate_json((folder / STATE_NAME).read_text())
    except (OSError, ValidationError):
        return None
    return state if process_start(state.pid) == state.pid_start else None


@contextlib.contextmanager
def only_mesh_here(folder: Path) -> Iterator[None]:
    """Hold the folder for one `meshift up`; the state file is gone afterwards. Raises `CommandError` if another
    has it. A killed one holds it no more."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_NAME).open("a") as lock:
        os.set_inheritable(lock.fileno(), False)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            running = read_state(folder)
            where = f" at {running.url} (process {running.pid})" if running else ""
            raise CommandError(f"a mesh runs from {folder} already{where}; --state-dir starts another") from None
        try:
            yield
        finally:
            (folder / STATE_NAME).unlink(missing_ok=True)
