"""One service, alone: `meshift worker`, `scheduler`, `coordinator`, `frontend` and `launcher`."""

import asyncio
import importlib
from typing import Any

from meshift.services.cli.settings import parse_settings

SETTINGS_CLASSES = {
    "worker": "WorkerSettings",
    "scheduler": "SchedulerSettings",
    "coordinator": "CoordinatorSettings",
    "frontend": "FrontendSettings",
    "launcher": "LauncherSettings",
}


def main(name: str, arguments: list[str]) -> int:
    """Run the service until it is told to end; returns its exit status."""
    module: Any = importlib.import_module(f"meshift.services.{name}.main")
    settings = parse_settings(getattr(module, SETTINGS_CLASSES[name]), f"meshift {name}", arguments)
    return int(asyncio.run(module.run(settings)))
