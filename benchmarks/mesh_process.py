"""A mesh of processes for benchmarks and tests: `meshift up`, and the means to hurt it."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshift.services.cli.state import ClusterState, read_state

UP = (sys.executable, "-P", "-m", "meshift.services.cli", "up", "--port", "0")
STOP_DEADLINE_S = 60.0


class MeshProcessError(Exception):
    """The mesh didn't come up, or didn't end; the message has what it printed."""


@dataclass
class MeshProcess:
    """A running `meshift up`."""

    process: asyncio.subprocess.Process
    state_dir: Path
    printed: list[str]

    @property
    def url(self) -> str:
        """Of the REST API."""
        return self.state().url

    def state(self) -> ClusterState:
        """What it wrote down of itself."""
        state = read_state(self.state_dir)
        if state is None:
            raise MeshProcessError("it is gone:\n" + "\n".join(self.printed))
        return state

    def kill(self, service: str) -> None:
        """kill -9 of one of its services."""
        os.kill(self.state().pids[service], signal.SIGKILL)

    async def until_printed(self, text: str, deadline_s: float) -> None:
        """Returns once a line has `text` in it. Raises MeshProcessError."""
        try:
            async with asyncio.timeout(deadline_s):
                while not any(text in line for line in self.printed):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise MeshProcessError(f"{deadline_s} s without {text!r}:\n" + "\n".join(self.printed)) from None

    async def stop(self) -> int:
        """Ctrl-C; returns its exit status. Raises MeshProcessError if it doesn't end."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGINT)
        try:
            async with asyncio.timeout(STOP_DEADLINE_S):
                return await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
            raise MeshProcessError("it did not end:\n" + "\n".join(self.printed)) from None


@contextlib.asynccontextmanager
async def running_mesh(
    state_dir: Path,
    *arguments: str,
    settings: Mapping[str, str] | None = None,
    start_deadline_s: float = 300.0,
) -> AsyncIterator[MeshProcess]:
    """`meshift up` with `arguments`, ready; ended afterwards. `settings`: MESHIFT_ variables of its services."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MESHIFT_")}
    process = await asyncio.create_subprocess_exec(
        *UP,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**kept, **(settings or {}), "MESHIFT_STATE_DIR": str(state_dir)},
    )
    mesh = MeshProcess(process, state_dir, [])
    reader = asyncio.get_running_loop().create_task(_read(process, mesh.printed))
    try:
        await mesh.until_printed("ready http", start_deadline_s)
        yield mesh
    finally:
        await mesh.stop()
        await reader


async def _read(process: asyncio.subprocess.Process, printed: list[str]) -> None:
    assert process.stdout is not None
    while line := await process.stdout.readline():
        printed.append(line.decode().rstrip("\n"))
