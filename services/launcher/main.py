"""The launcher process of a compose project: scales its workers as the scheduler says."""

import logging
import os
import re
import shutil
from pathlib import Path

from pydantic import Field

from meshift.services.bus_process import until_stopped
from meshift.services.launcher.base import LauncherError, LaunchSpec
from meshift.services.launcher.compose import ComposeLauncher, ComposeProject
from meshift.services.launcher.service import LauncherOptions, LauncherService
from meshift.services.process import (
    EXIT_FAILED,
    ServiceSettings,
    StopSignal,
    configure_logging,
    connect_bus,
    new_incarnation,
    say,
)

logger = logging.getLogger(__name__)

PROJECT_VARIABLE = "COMPOSE_PROJECT_NAME"

SYSTEM_PLUGINS = tuple(
    Path(root, "docker", "cli-plugins") for root in ("/usr/local/lib", "/usr/local/libexec", "/usr/lib", "/usr/libexec")
)


class LauncherSettings(ServiceSettings, LauncherOptions):
    """Start and drain workers of a docker compose project by load, as the scheduler's policy says. Runs where `docker`
    does; with the environment that the project was brought up with, or new workers are configured otherwise."""

    launcher_id: str = Field("launcher", description="its name on the bus")
    compose_file: tuple[Path, ...] = Field(
        (Path("compose/docker-compose.yml"),), min_length=1, description="the project's files, in their order"
    )
    project: str | None = Field(
        None, description=f"its name; without it, ${PROJECT_VARIABLE}, or the first file's folder, as compose does it"
    )
    service: str = Field("worker", description="the service whose containers are instances")
    model_name: str = Field("smollm2", description="what they serve, by its name in the API")
    poll_s: float = Field(1.0, gt=0, description="how often containers are looked at")


def project_name(settings: LauncherSettings) -> str:
    """As compose names it."""
    name = settings.project or os.environ.get(PROJECT_VARIABLE)
    # Compose leaves out of a folder's name what a project's must not have.
    return name or re.sub(r"[^a-z0-9_-]", "", settings.compose_file[0].absolute().parent.name.lower())


def project_of(settings: LauncherSettings) -> ComposeProject:
    """Raises LauncherError if a file isn't there, or docker isn't."""
    for file in settings.compose_file:
        if not file.is_file():
            raise LauncherError(f"{file} is no file; --compose-file names it")
    docker = shutil.which("docker")
    if docker is None:
        raise LauncherError("no `docker` on PATH")
    apart = shutil.which("docker-compose")
    compose = (apart,) if apart is not None and not _has_compose() else (docker, "compose")
    files = tuple(file.absolute() for file in settings.compose_file)
    return ComposeProject(files, project_name(settings), settings.service, (docker,), compose)


def _has_compose() -> bool:
    """Whether the plugin is in one of the folders in which docker looks for it."""
    own = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "cli-plugins"
    return any((folder / "docker-compose").is_file() for folder in (own, *SYSTEM_PLUGINS))


async def run(settings: LauncherSettings) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code. What it launched goes on."""
    configure_logging(settings.log_level)
    stop = StopSignal()
    try:
        launcher = ComposeLauncher(project_of(settings), settings.poll_s)
        await launcher.start()
    except LauncherError as error:
        logger.error("launcher %s can't start: %s", settings.launcher_id, error)
        return EXIT_FAILED
    service = LauncherService(
        settings.launcher_id,
        new_incarnation(),
        connect_bus(settings, settings.launcher_id),
        launcher,
        lambda name: LaunchSpec(settings.service),
        settings.model_name,
        settings,
        say=say,
    )
    try:
        return await until_stopped(service.start(), stop, f"launcher {settings.launcher_id}", logger)
    finally:
        await service.stop()
        await launcher.close()
