"""The `docker` command, with deadlines, and what it says of the containers of a compose service."""

import asyncio
import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from meshift.services.launcher.base import LauncherError
from meshift.services.launcher.lifecycle import ChildState

SHORT_ID_CHARS = 12
"""Of a container's id, which is its host name, too, unless somebody sets another."""

ERROR_CHARS_MAX = 400

FORMAT = "{{.ID}}\t{{.State}}\t{{.Status}}"
HEALTH = re.compile(r"\((?:health: )?(starting|healthy|unhealthy)\)")


@dataclass(frozen=True, slots=True)
class Container:
    """One, as `docker ps` shows it."""

    container_id: str
    """In full."""
    state: str
    """created, running, paused, restarting, removing, exited or dead."""
    health: str
    """starting, healthy or unhealthy; empty without a health check, or while it doesn't run."""

    @property
    def short_id(self) -> str:
        """Its host name."""
        return self.container_id[:SHORT_ID_CHARS]


def parse_containers(text: str) -> list[Container]:
    """The lines of `docker ps --format FORMAT`. Raises LauncherError."""
    containers = []
    for line in text.splitlines():
        parts = line.split("\t")
        if len(parts) != len(FORMAT.split("\t")):
            raise LauncherError(f"docker ps says {line!r}")
        container_id, state, status = parts
        health = HEALTH.search(status)
        containers.append(Container(container_id, state, health[1] if health else ""))
    return containers


def child_state(container: Container, was_ready: bool) -> ChildState:
    """Where its service is. Without a health check it is ready when it runs."""
    if container.state == "running":
        # Whether one that was ready still serves, its own reports tell sooner than a health check.
        unready = container.health == "starting" or (container.health == "unhealthy" and not was_ready)
        return ChildState.STARTING if unready else ChildState.READY
    if container.state == "restarting":
        return ChildState.BACKOFF
    if container.state in ("created", "paused"):
        return ChildState.STARTING
    return ChildState.STOPPED if was_ready else ChildState.FAILED


class Docker:
    """Runs it. `command`: the executable, with arguments that go first (such as `--host`)."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)

    async def run(self, *arguments: str, timeout_s: float) -> str:
        """Its output. Raises LauncherError with what it complained of, or when it takes too long; then it is killed."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            raise LauncherError(f"{self._command[0]} can't be run: {error.strerror}") from error
        what = " ".join((*self._command, *arguments[:2]))
        try:
            async with asyncio.timeout(timeout_s):
                output, complaint = await process.communicate()
        except TimeoutError:
            raise LauncherError(f"`{what}` took longer than {timeout_s:g} s") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode:
            told = complaint.decode(errors="replace").strip()[-ERROR_CHARS_MAX:]
            raise LauncherError(f"`{what}` ended with {process.returncode}: {told or 'it says nothing'}")
        return output.decode(errors="replace")
