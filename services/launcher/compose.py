"""A `Launcher` by docker compose: instances are containers of one service of a project.

It scales that service up, one container at a time; which one is to go, it stops and removes itself (compose would take
any). An instance is named after its container, as the service's entrypoint does it, so a launch gives its name only
when the container is there. Containers stay when the launcher ends, and the next one finds them.
"""

import asyncio
import builtins
import contextlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshift.services.launcher.base import ChildStatus, LauncherError, LaunchSpec
from meshift.services.launcher.docker import FORMAT, Container, Docker, child_state, parse_containers
from meshift.services.launcher.lifecycle import ENDED, ChildState

logger = logging.getLogger(__name__)

COMMAND_TIMEOUT_S = 30.0
UP_TIMEOUT_S = 300.0
"""Compose may wait for others of its commands, or for images that are unpacked."""
STOP_MARGIN_S = 30.0
"""Beyond its deadline, after which docker kills a container, until the command that stops it is given up."""
LOG_LINES = 20


@dataclass(frozen=True, slots=True)
class ComposeProject:
    """Where the service is."""

    files: tuple[Path, ...]
    name: str
    """Of the project: `-p`."""
    service: str = "worker"
    docker: tuple[str, ...] = ("docker",)
    compose: tuple[str, ...] = ("docker", "compose")
    """`docker-compose` where that is it."""


@dataclass(slots=True)
class _Known:
    container: Container
    state: ChildState
    ever_ready: bool = False
    restarts: int = 0


class ComposeLauncher:
    """See the module. `poll_s`: how often containers are looked at."""

    def __init__(self, project: ComposeProject, poll_s: float = 1.0) -> None:
        self._project = project
        self._poll_s = poll_s
        self._docker = Docker(project.docker)
        self._compose = Docker(project.compose)
        self._known: dict[str, _Known] = {}
        self._stopping: set[str] = set()
        self._lock = asyncio.Lock()
        """One command at a time changes the service: compose counts containers before it adds one."""
        self._changed = asyncio.Event()
        self._polling: asyncio.Task[None] | None = None
        self._trouble = ""

    async def start(self) -> None:
        """Look at what runs, and go on looking. Raises LauncherError if docker doesn't answer."""
        await self._refresh()
        self._polling = asyncio.get_running_loop().create_task(self._poll(), name="look at containers")

    async def close(self) -> None:
        """Look no more; containers go on. Idempotent."""
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)
            self._polling = None

    async def launch(self, instance_id: str, spec: LaunchSpec) -> str:
        """See `Launcher`. The settings are the compose file's: `spec` has none. The name is the container's."""
        async with self._lock:
            await self._refresh()
            await self._remove_ended()
            before = {known.container.container_id for known in self._known.values()}
            try:
                await self._scale(len(before) + 1)
            except (LauncherError, asyncio.CancelledError):
                await self._remove_new(before)
                raise
            await self._refresh()
            new = [name for name, known in self._known.items() if known.container.container_id not in before]
            if len(new) != 1:
                raise LauncherError(f"{len(new)} containers were made of {self._project.service}, not one")
            return new[0]

    async def wait_ready(self, instance_id: str) -> None:
        """See `Launcher`. One that ends before it was ready has failed: docker would start it again for ever."""
        while True:
            known = self._known.get(instance_id)
            if known is None:
                raise LauncherError(f"{instance_id} has no container")
            if known.state is ChildState.READY:
                return
            if not known.ever_ready and known.state in (*ENDED, ChildState.BACKOFF, ChildState.STOPPING):
                raise LauncherError(
                    f"{instance_id} {known.container.state}; the end of its log:\n{await self._log(known)}"
                )
            changed = self._changed
            await changed.wait()

    async def retire(self, instance_id: str) -> None:
        """See `Launcher`: docker's restart policy knows no end that is meant."""
        known = self._get(instance_id)
        await self._docker.run("update", "--restart", "no", known.container.container_id, timeout_s=COMMAND_TIMEOUT_S)

    async def stop(self, instance_id: str, deadline_s: float) -> None:
        """See `Launcher`: it is asked, killed by docker after `deadline_s`, and removed."""
        container_id = self._get(instance_id).container.container_id
        self._stopping.add(instance_id)
        self._update(instance_id, ChildState.STOPPING)
        try:
            async with self._lock:
                await self._stop_container(container_id, deadline_s)
                await self._refresh()
        finally:
            self._stopping.discard(instance_id)

    def list(self) -> builtins.list[ChildStatus]:
        """See `Launcher`."""
        return [ChildStatus(name, known.state, None, known.restarts, Path()) for name, known in self._known.items()]

    # ---- what docker is told

    async def _scale(self, count: int) -> None:
        project = self._project
        files = [word for file in project.files for word in ("-f", str(file))]
        await self._compose.run(
            *("-p", project.name, *files, "up", "--detach", "--no-deps", "--no-recreate", "--no-build"),
            *("--scale", f"{project.service}={count}", project.service),
            timeout_s=UP_TIMEOUT_S,
        )

    async def _stop_container(self, container_id: str, deadline_s: float) -> None:
        try:
            await self._docker.run(
                *("stop", "--time", str(math.ceil(deadline_s)), container_id), timeout_s=deadline_s + STOP_MARGIN_S
            )
        except LauncherError as error:
            logger.warning("%s", error)
        await self._docker.run("rm", "--force", container_id, timeout_s=COMMAND_TIMEOUT_S)

    async def _remove_ended(self) -> None:
        """Compose would start them again, in the place of a new one."""
        for name, known in list(self._known.items()):
            if known.state in ENDED:
                await self._docker.run("rm", "--force", known.container.container_id, timeout_s=COMMAND_TIMEOUT_S)
                del self._known[name]

    async def _remove_new(self, before: set[str]) -> None:
        """What a scaling left that failed or was given up: nobody waits for it."""
        with contextlib.suppress(LauncherError):
            await self._refresh()
            for known in list(self._known.values()):
                if known.container.container_id not in before:
                    await self._stop_container(known.container.container_id, 0.0)
            await self._refresh()

    async def _log(self, known: _Known) -> str:
        try:
            container_id = known.container.container_id
            return (
                await self._docker.run("logs", "--tail", str(LOG_LINES), container_id, timeout_s=COMMAND_TIMEOUT_S)
            ).strip()
        except LauncherError as error:
            return str(error)

    # ---- what docker says

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                async with self._lock:
                    await self._refresh()
                self._trouble = ""
            except LauncherError as error:
                # Once: it is asked again every second.
                if str(error) != self._trouble:
                    logger.error("containers can't be looked at: %s", error)
                self._trouble = str(error)

    async def _refresh(self) -> None:
        project = self._project
        labels = {"project": project.name, "service": project.service, "oneoff": "False"}
        filters = [
            word for name, value in labels.items() for word in ("--filter", f"label=com.docker.compose.{name}={value}")
        ]
        text = await self._docker.run(
            "ps", "--all", "--no-trunc", *filters, "--format", FORMAT, timeout_s=COMMAND_TIMEOUT_S
        )
        self._take(parse_containers(text))

    def _take(self, containers: Sequence[Container]) -> None:
        found = {f"worker-{container.short_id}": container for container in containers}
        for name in list(self._known):
            if name not in found:
                del self._known[name]
        for name, container in found.items():
            known = self._known.get(name)
            if known is None:
                # Found, not made: one that runs has been ready for all we know of it.
                self._known[name] = known = _Known(container, ChildState.STARTING)
            known.container = container
            state = child_state(container, known.ever_ready)
            known.restarts += state is ChildState.BACKOFF and known.state is not ChildState.BACKOFF
            known.ever_ready |= state is ChildState.READY
            known.state = ChildState.STOPPING if name in self._stopping and state not in ENDED else state
        self._tell()

    def _update(self, name: str, state: ChildState) -> None:
        self._known[name].state = state
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _get(self, instance_id: str) -> _Known:
        try:
            return self._known[instance_id]
        except KeyError:
            raise LauncherError(f"{instance_id} has no container") from None
