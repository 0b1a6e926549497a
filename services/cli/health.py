"""`meshift health SERVICE`: whether a service of this machine lives; for health checks of containers.

It runs every few seconds, so it imports nothing but the standard library: bus services are asked in NATS's own text
protocol. Exit status 0 or 1.
"""

import argparse
import json
import os
import socket
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from typing import Any, BinaryIO
from urllib.parse import urlsplit

TIMEOUT_S = 3.0
NATS_PORT = 4222
HTTP_OK = 200

STATUS_SUBJECT = "meshift.v1.worker.{name}.status"
"""As `schemas.subjects.worker_status` has it: served only while the worker's engine runs."""
PING_SUBJECT = "$SRV.PING.{name}"
"""Of NATS's micro services: every service answers it."""
STATUS_REQUEST = b'{"kind":"status_request"}'

NOBODY = b"NATS/1.0 503"
"""What the server itself answers for a subject without a subscriber."""


class Unhealthy(Exception):
    """The service isn't there, or says that it can't serve; the message says which."""


def main(name: str, arguments: list[str]) -> int:
    """Ask once."""
    parser = argparse.ArgumentParser(prog=f"meshift {name}", description="Exit status 0 if the service lives, else 1.")
    parser.add_argument("service", choices=sorted(CHECKS))
    try:
        print(CHECKS[parser.parse_args(arguments).service]())
    except (Unhealthy, OSError, ValueError) as error:
        print(f"meshift {name}: {error}", file=sys.stderr)
        return 1
    return 0


def check_frontend() -> str:
    """Its own probe, on its port."""
    return check_url(f"http://127.0.0.1:{setting('port', '8000')}/health")


def check_scheduler() -> str:
    """A ping over the bus."""
    return check_by_ping("scheduler")


def check_coordinator() -> str:
    """The same."""
    return check_by_ping("coordinator")


def check_by_ping(service: str) -> str:
    """That a service of that kind answers as a NATS micro service."""
    answer = ask_bus(setting("nats", "nats://127.0.0.1:4222"), PING_SUBJECT.format(name=service), b"")
    return f"{answer['name']} {answer['id']} answers"


def check_worker() -> str:
    """Its status over the bus."""
    subject = STATUS_SUBJECT.format(name=setting("instance_id", "worker-1"))
    answer = ask_bus(setting("nats", "nats://127.0.0.1:4222"), subject, STATUS_REQUEST)
    if "load" not in answer:
        raise Unhealthy(f"the worker answers {json.dumps(answer)[:200]}")
    return f"{answer['load']['state']}, {answer['requests']} requests"


CHECKS: dict[str, Callable[[], str]] = {
    "frontend": check_frontend,
    "scheduler": check_scheduler,
    "coordinator": check_coordinator,
    "worker": check_worker,
}


def setting(name: str, default: str) -> str:
    """A setting of the service, which its container's environment has."""
    return os.environ.get(f"MESHIFT_{name.upper()}") or default


def check_url(url: str) -> str:
    """GET it. Raises `Unhealthy` for any answer but 200, OSError if there is none."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            if response.status == HTTP_OK:
                return f"{url}: {response.status}"
            raise Unhealthy(f"{url}: {response.status}")
    except urllib.error.HTTPError as error:
        raise Unhealthy(f"{url}: {error.code}") from error


def ask_bus(servers: str, subject: str, request: bytes) -> dict[str, Any]:
    """One request to whoever serves the subject. Raises `Unhealthy` if nobody does, OSError if no server answers."""
    trouble: OSError | None = None
    for url in servers.split(","):
        parts = urlsplit(url.strip())
        try:
            with socket.create_connection((parts.hostname or "", parts.port or NATS_PORT), TIMEOUT_S) as connection:
                return _ask(connection, _connect_line(parts.username, parts.password), subject, request)
        except OSError as error:
            trouble = OSError(f"{parts.hostname}: {error}")
    raise trouble or ValueError("no NATS server is named")


def _connect_line(user: str | None, password: str | None) -> bytes:
    options: dict[str, Any] = {"verbose": False, "pedantic": False, "headers": True, "no_responders": True}
    if user is not None:
        # A lone word before the @ is a token.
        options |= {"auth_token": user} if password is None else {"user": user, "pass": password}
    return b"CONNECT " + json.dumps(options).encode() + b"\r\n"


def _ask(connection: socket.socket, connect: bytes, subject: str, request: bytes) -> dict[str, Any]:
    connection.settimeout(TIMEOUT_S)
    inbox = f"_INBOX.health.{uuid.uuid4().hex}"
    lines = f"SUB {inbox} 1\r\nPUB {subject} {inbox} {len(request)}\r\n".encode()
    connection.sendall(connect + lines + request + b"\r\n")
    with connection.makefile("rb") as stream:
        return _read_answer(stream, subject)


def _read_answer(stream: BinaryIO, subject: str) -> dict[str, Any]:
    """The first message. What else a server says, and pings, is passed over: the answer comes before a pong is due."""
    while line := stream.readline():
        words = line.split()
        if words[:1] == [b"-ERR"]:
            raise Unhealthy(line.decode().strip())
        if words[:1] not in ([b"MSG"], [b"HMSG"]):
            continue
        header_bytes = int(words[-2]) if words[0] == b"HMSG" else 0
        message = stream.read(int(words[-1]))
        if message.startswith(NOBODY):
            raise Unhealthy(f"nobody serves {subject}")
        answer = json.loads(message[header_bytes:])
        if not isinstance(answer, dict):
            raise Unhealthy(f"{subject} answers {answer!r}")
        return answer
    raise Unhealthy("the NATS server closed the connection")
