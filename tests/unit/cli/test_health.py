"""`meshift health`, against a NATS server that plays its part, and against a real one."""

import asyncio
import http.server
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshift.schemas import subjects
from meshift.schemas.instances import StatusRequest, WorkerStatus
from meshift.services.bus.base import ServiceInfo
from meshift.services.bus.codec import decode
from meshift.services.bus.nats import NatsBus
from meshift.services.bus.nats_settings import NatsSettings
from meshift.services.cli import health
from meshift.services.cli.health import STATUS_REQUEST, STATUS_SUBJECT, Unhealthy, ask_bus
from meshift.services.cli.main import main
from meshift.services.launcher.nats_server import NatsServer
from tests.support.reports import load_report

DEADLINE_S = 5.0
Play = Callable[[str], tuple[bytes, ...]]


class FakeServer(threading.Thread):
    """Greets, reads until a request has come, and answers what it was given."""

    def __init__(self, *answers: bytes) -> None:
        super().__init__(daemon=True)
        self.received = b""
        self._answers = answers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(DEADLINE_S)
        self.url = f"nats://127.0.0.1:{self._listener.getsockname()[1]}"

    def run(self) -> None:
        with self._listener, self._listener.accept()[0] as connection:
            connection.settimeout(DEADLINE_S)
            connection.sendall(b'INFO {"server_id":"x"}\r\n')
            while b"PUB " not in self.received or not self.received.endswith(b"\r\n"):
                self.received += connection.recv(4096)
            connection.sendall(b"".join(self._answers))


def serve(*answers: bytes) -> FakeServer:
    server = FakeServer(*answers)
    server.start()
    return server


def message(body: bytes) -> bytes:
    return b"MSG _INBOX.x 1 %d\r\n%b\r\n" % (len(body), body)


def message_with_headers(header: bytes, body: bytes) -> bytes:
    return b"HMSG _INBOX.x 1 %d %d\r\n%b%b\r\n" % (len(header), len(header) + len(body), header, body)


def test_an_answer_is_found_among_other_lines() -> None:
    server = serve(b"PING\r\n", b"+OK\r\n", message(b'{"id":"a"}'))
    assert ask_bus(server.url, "some.subject", b"hello") == {"id": "a"}
    server.join(DEADLINE_S)
    assert b"\r\nPUB some.subject _INBOX.health." in server.received
    assert server.received.endswith(b" 5\r\nhello\r\n")


def test_an_answer_with_headers() -> None:
    server = serve(message_with_headers(b"NATS/1.0\r\na: b\r\n\r\n", b'{"id":"a"}'))
    assert ask_bus(server.url, "s", b"") == {"id": "a"}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (message_with_headers(b"NATS/1.0 503\r\n\r\n", b""), "nobody serves s"),
        (b"-ERR 'Authorization Violation'\r\n", "Authorization"),
        (message(b"[]"), "answers"),
        (b"", "closed the connection"),
    ],
)
def test_what_is_not_an_answer(answer: bytes, text: str) -> None:
    with pytest.raises(Unhealthy, match=text):
        ask_bus(serve(answer).url, "s", b"")


def test_the_next_server_is_tried_and_credentials_are_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = f"nats://127.0.0.1:{closed.getsockname()[1]}"
    server = serve(message(b"{}"))
    assert ask_bus(f"{gone}, {server.url.replace('://', '://me:secret@')}", "s", b"") == {}
    server.join(DEADLINE_S)
    options = json.loads(server.received.splitlines()[0].removeprefix(b"CONNECT "))
    assert (options["user"], options["pass"]) == ("me", "secret")
    with pytest.raises(OSError, match=r"127\.0\.0\.1"):
        ask_bus(gone, "s", b"")


def test_the_worker_is_asked_as_the_bus_would() -> None:
    assert STATUS_SUBJECT.format(name="w") == subjects.worker_status("w")
    assert decode(StatusRequest, STATUS_REQUEST) == StatusRequest()


@pytest.fixture
def frontend_status() -> Iterator[list[int]]:
    """A frontend at MESHIFT_PORT; its next answer's status can be set."""
    status = [200]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status[0] if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHIFT_PORT", str(server.server_address[1]))
        yield status
    server.shutdown()
    server.server_close()
    thread.join(DEADLINE_S)


def test_frontend(frontend_status: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "frontend"]) == 0
    frontend_status[0] = 500
    assert main(["health", "frontend"]) == 1
    assert "500" in capsys.readouterr().err


def test_nothing_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setenv("MESHIFT_PORT", str(port))
    monkeypatch.setenv("MESHIFT_NATS", f"nats://127.0.0.1:{port}")
    for service in ("frontend", "scheduler", "worker"):
        assert main(["health", service]) == 1
    assert capsys.readouterr().err.count("meshift health: ") == 3


@pytest.mark.nats
async def test_over_a_real_bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with NatsServer(tmp_path) as server:
        monkeypatch.setenv("MESHIFT_NATS", server.url)
        monkeypatch.setenv("MESHIFT_INSTANCE_ID", "w")
        bus = NatsBus(NatsSettings(servers=(server.url,), client_name="test"))
        await bus.start(ServiceInfo("scheduler", "s"))
        try:
            assert "answers" in await asyncio.to_thread(health.check_scheduler)
            with pytest.raises(Unhealthy, match="nobody serves"):
                await asyncio.to_thread(health.check_worker)
            status = WorkerStatus(load=load_report("w"), engine="sim", ranks=(), requests=3, unacknowledged=0)
            bus.serve("status", subjects.worker_status("w"), StatusRequest, lambda _: status)
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    try:
                        assert await asyncio.to_thread(health.check_worker) == "ready, 3 requests"
                        break
                    except Unhealthy:  # the server doesn't know the new subscription yet
                        continue
        finally:
            await bus.close()
