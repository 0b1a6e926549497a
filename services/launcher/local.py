"""Services as child processes of this one. They end with it, even if it is killed."""

import builtins
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from meshift.services.launcher.base import ChildStatus, EventHandler, LauncherError, LaunchSpec
from meshift.services.launcher.child import Child
from meshift.services.launcher.lifecycle import ENDED
from meshift.services.launcher.restart import RestartPolicy, decide_restart

CommandOf = Callable[[LaunchSpec], Sequence[str]]


def meshift_command(spec: LaunchSpec) -> list[str]:
    """The `meshift` of this interpreter, with the settings as flags. `-P` keeps the working directory off the
    import path, where a folder could shadow a package."""
    command = [sys.executable, "-P", "-m", "meshift.services.cli", spec.service]
    for name, value in spec.settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            command += [f"--{flag}", str(value)]
    return command


class LocalLauncher:
    """A `Launcher` on this machine. Each service logs to `log_dir/<instance id>.log`."""

    def __init__(
        self,
        log_dir: Path,
        on_event: EventHandler = lambda event: None,
        command_of: CommandOf = meshift_command,
        policy: RestartPolicy = decide_restart,
    ) -> None:
        self._policy = policy
        self._log_dir = log_dir
        self._on_event = on_event
        self._command_of = command_of
        self._children: dict[str, Child] = {}

    async def launch(self, instance_id: str, spec: LaunchSpec) -> str:
        """See `Launcher`."""
        known = self._children.get(instance_id)
        if known is not None and known.status().state not in ENDED:
            raise LauncherError(f"{instance_id} runs already")
        log = self._log_dir / f"{instance_id}.log"
        child = Child(instance_id, self._command_of(spec), log, self._on_event, self._policy)
        self._children[instance_id] = child
        await child.start()
        return instance_id

    async def wait_ready(self, instance_id: str) -> None:
        """See `Launcher`."""
        await self._child(instance_id).wait_ready()

    async def retire(self, instance_id: str) -> None:
        """See `Launcher`. Who ends well isn't started again anyway."""
        self._child(instance_id)

    async def stop(self, instance_id: str, deadline_s: float) -> None:
        """See `Launcher`."""
        await self._child(instance_id).stop(deadline_s)

    def kill(self) -> None:
        """End all at once, by force: the second Ctrl-C."""
        for child in self._children.values():
            child.kill()

    def list(self) -> builtins.list[ChildStatus]:
        """See `Launcher`."""
        return [child.status() for child in self._children.values()]

    def _child(self, instance_id: str) -> Child:
        try:
            return self._children[instance_id]
        except KeyError:
            raise LauncherError(f"{instance_id} was never launched") from None
