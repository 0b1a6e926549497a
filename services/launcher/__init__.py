"""Starts and stops the processes of a mesh: a `Launcher` interface, by this machine's processes or docker compose."""

from meshift.services.launcher.base import (
    ChildEvent,
    ChildStatus,
    Launcher,
    LauncherError,
    LaunchSpec,
)
from meshift.services.launcher.lifecycle import ChildState
from meshift.services.launcher.local import LocalLauncher

__all__ = [
    "ChildEvent",
    "ChildState",
    "ChildStatus",
    "LaunchSpec",
    "Launcher",
    "LauncherError",
    "LocalLauncher",
]
