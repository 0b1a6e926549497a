"""Child processes of the launcher."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshift.services.launcher.parent_death import end_with_parent


async def spawn(command: Sequence[str], environment: Mapping[str, str], log: Path) -> asyncio.subprocess.Process:
    """Start `command` in a process group of its own, with its output appended to `log`. A Ctrl-C at the terminal
    doesn't reach it: whoever called this decides. When this process ends, however it ends, the kernel kills the child.
    Raises OSError."""
    with log.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **environment},
            process_group=0,
            preexec_fn=end_with_parent(signal.SIGKILL),
        )


def signal_process(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Send a signal to the process alone, if it still is there."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def kill_group(process: asyncio.subprocess.Process) -> None:
    """Kill what is left of the process's group, itself included."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
