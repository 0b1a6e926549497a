"""What starts and stops services, wherever they run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from meshift.services.launcher.lifecycle import ChildState

Settings = Mapping[str, str | int | float | bool]
"""Field name of a service's settings -> value."""


class LauncherError(Exception):
    """The launcher can't do what was asked; the message says why."""


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """A service with its settings; the launcher knows how to run it where it is."""

    service: str
    """`worker`, `scheduler`, `coordinator` or `frontend`: the subcommand of `meshift`."""
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChildStatus:
    """One launched service, now."""

    instance_id: str
    state: ChildState
    pid: int | None
    """None while none runs."""
    restarts: int
    log: Path


@dataclass(frozen=True, slots=True)
class ChildEvent:
    """A launched service changed its state."""

    status: ChildStatus
    text: str
    """What happened, for a human."""


EventHandler = Callable[[ChildEvent], None]


class Launcher(Protocol):
    """Runs services under names of their own, and runs them again when they die."""

    async def launch(self, instance_id: str, spec: LaunchSpec) -> str:
        """Start it; returns when its process exists, with the name that it has: another one where names can't be
        chosen. Raises `LauncherError` if the name is taken by one that still runs, or if the process can't be made."""

    async def wait_ready(self, instance_id: str) -> None:
        """Return when it has said that it is ready. Raises `LauncherError`, with the end of its log, if it fails."""

    async def retire(self, instance_id: str) -> None:
        """It is about to drain and leave by itself: it isn't to be started again then. Raises `LauncherError`."""

    async def stop(self, instance_id: str, deadline_s: float) -> None:
        """Ask it to drain and end, by force after `deadline_s`; returns when it is gone. Idempotent."""

    def list(self) -> list[ChildStatus]:
        """All that were launched, in the order of their launch."""
