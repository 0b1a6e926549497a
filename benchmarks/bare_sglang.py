"""A stock SGLang server beside the mesh, with the server arguments of the mesh's own engine. By hand, until Ctrl-C,
with further ones of SGLang's behind ours:

.venv/bin/python -m meshift.benchmarks.bare_sglang --model smollm2 --port 30000
"""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import httpx

from meshift.backends.sglang.arguments import COMPUTE_NICENESS, rank_environment, server_arguments
from meshift.backends.sglang.plugin.activate import ENGINE_VARIABLE
from meshift.backends.sglang.processes import free_loopback_port
from meshift.backends.sglang.settings import SglangSettings
from meshift.benchmarks.cpu_time import tree
from meshift.services.cli.model import resolve_model
from meshift.services.launcher.parent_death import end_with_parent
from meshift.services.worker.engines import EngineSettings, sglang_settings

SERVER = (sys.executable, "-P", "-m", "sglang.launch_server")
START_DEADLINE_S = 480.0
STOP_DEADLINE_S = 20.0
POLL_S = 0.2
LOG_TAIL_CHARS = 3_000
SCHEDULER_TITLE = b"sglang::scheduler"
"""What SGLang calls the processes that compute."""

OURS_ALONE = (ENGINE_VARIABLE, "SGLANG_USE_PICKLE_IPC")
"""What makes a process a rank of a worker; without it SGLang is stock, but for running on any CPU."""


class BareServerError(Exception):
    """The server didn't come up; the message has its last words."""


@dataclass
class BareServer:
    """A running `sglang.launch_server`."""

    url: str
    process: asyncio.subprocess.Process
    log_path: Path

    @property
    def pid(self) -> int:
        """Of its main process; the others are its children."""
        return self.process.pid


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Flags for SGLang's server arguments. Raises ValueError for a value that has no flag."""
    words = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif isinstance(value, str | int | float) and value is not False:
            words += [flag, str(value)]
        elif value is not False:
            raise ValueError(f"{name}: {value!r} can't be a flag")
    return words


def server_command(settings: SglangSettings, port: int) -> list[str]:
    """Starts the server."""
    return [*SERVER, "--host", "127.0.0.1", "--port", str(port), *command_line(server_arguments(settings))]


def environment(settings: SglangSettings, base: Mapping[str, str]) -> dict[str, str]:
    """That of a rank, threads and platform alike, without what makes it one of ours."""
    return {name: value for name, value in rank_environment(settings, base).items() if name not in OURS_ALONE}


@contextlib.asynccontextmanager
async def running_bare_server(
    settings: SglangSettings, log_path: Path, niceness: int = COMPUTE_NICENESS
) -> AsyncIterator[BareServer]:
    """The server, ready; ended afterwards with all its processes. `niceness`: of its computing processes, by default
    that of the mesh's; 0 is SGLang's own. Raises BareServerError."""
    port = free_loopback_port()
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *server_command(settings, port),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment(settings, os.environ),
            start_new_session=True,
            preexec_fn=end_with_parent(),
        )
    server = BareServer(f"http://127.0.0.1:{port}", process, log_path)
    try:
        await _until_ready(server)
        be_nice(server, niceness)
        yield server
    finally:
        await _end(process)


async def _until_ready(server: BareServer) -> None:
    try:
        async with asyncio.timeout(START_DEADLINE_S), httpx.AsyncClient() as client:
            while server.process.returncode is None:
                with contextlib.suppress(httpx.HTTPError):
                    # Answers 200 only once the server's own warm-up request has been served.
                    if (await client.get(f"{server.url}/health")).status_code == httpx.codes.OK:
                        return
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise BareServerError(f"not ready after {START_DEADLINE_S:g} s:\n{_tail(server.log_path)}") from None
    raise BareServerError(f"ended with status {server.process.returncode}:\n{_tail(server.log_path)}")


def computing_processes(server: BareServer) -> list[int]:
    """Those that run the model."""
    return [pid for pid in tree(server.pid)[1:] if SCHEDULER_TITLE in Path(f"/proc/{pid}/cmdline").read_bytes()]


def be_nice(server: BareServer, niceness: int) -> None:
    """Let the threads that compute give way. The server's warm-up is over, so all are there. Raises BareServerError if
    none is."""
    computing = computing_processes(server)
    if not computing:
        raise BareServerError(f"no process is called {SCHEDULER_TITLE.decode()}")
    for pid in computing:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), niceness)


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-LOG_TAIL_CHARS:]


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM to the main process, which ends the others; then the whole group by force."""
    if process.returncode is None:
        process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_DEADLINE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def main() -> NoReturn:
    """Become the server."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(".")[0])
    parser.add_argument("--model", default="smollm2", help="a prepared model's name, or a folder")
    parser.add_argument("--port", type=int, default=30_000)
    arguments, more = parser.parse_known_args()
    settings = sglang_settings(EngineSettings(model=resolve_model(arguments.model)))
    command = [*server_command(settings, arguments.port), *more]
    os.execve(command[0], command, environment(settings, os.environ))


if __name__ == "__main__":
    main()
