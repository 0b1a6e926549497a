"""Data threads of two processes, one of which is frozen or killed: an error by the deadline, from either
transport."""

import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from meshift.kv_memory.data_thread import CHECKSUM_LATER, DataThread
from meshift.kv_memory.rectangle import Rectangle
from meshift.kv_memory.transport import Address, Patch, TransportError, create_transport

TIMEOUT_S = 20.0
SOON_S = 0.2
PAYLOAD = bytes(3 << 20)

Peer = tuple["subprocess.Popen[str]", list[Address]]


def start_peer(scheme: str) -> Peer:
    command = [sys.executable, "-m", "tests.unit.kv_memory.peer_process", scheme]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = (line for line in process.stdout if line.startswith("["))
    return process, [Address(*json.loads(next(lines))) for _ in range(2)]


@pytest.fixture(params=["tcp", "nixl"])
def scheme(request: pytest.FixtureRequest) -> str:
    if request.param == "nixl":
        pytest.importorskip("nixl", reason="NIXL isn't installed: pip install nixl")
    return str(request.param)


@pytest.fixture
def peer(scheme: str) -> Iterator[Peer]:
    process, addresses = start_peer(scheme)
    try:
        yield process, addresses
    finally:
        process.kill()
        process.wait(TIMEOUT_S)


@pytest.fixture
def sender(scheme: str) -> Iterator[DataThread]:
    thread = DataThread(lambda: create_transport(scheme, location="127.0.0.1"))
    thread.start(timeout_s=TIMEOUT_S)
    yield thread
    assert thread.close(timeout_s=TIMEOUT_S)


def send(sender: DataThread, address: Address, name: str, timeout_s: float) -> TransportError | None:
    done: queue.SimpleQueue[TransportError | None] = queue.SimpleQueue()
    patch = Patch(name, 1, 0, Rectangle(0, 1, 0, 1, 0, 1), PAYLOAD, CHECKSUM_LATER)
    sender.post(address, patch, timeout_s, done.put)
    return done.get(timeout=TIMEOUT_S)


def test_a_frozen_process_fails_sends_by_their_deadline(peer: Peer, sender: DataThread) -> None:
    process, (one, two) = peer
    assert send(sender, one, "one", TIMEOUT_S) is None
    os.kill(process.pid, signal.SIGSTOP)
    # It goes on for a moment, on another core.
    os.waitpid(process.pid, os.WUNTRACED)
    assert isinstance(send(sender, one, "one", SOON_S), TransportError)
    assert isinstance(send(sender, two, "two", SOON_S), TransportError)


def test_a_killed_process_fails_sends(peer: Peer, sender: DataThread) -> None:
    process, (one, two) = peer
    assert send(sender, one, "one", TIMEOUT_S) is None
    process.kill()
    process.wait(TIMEOUT_S)
    assert isinstance(send(sender, one, "one", TIMEOUT_S / 2), TransportError)
    assert isinstance(send(sender, two, "two", TIMEOUT_S / 2), TransportError)


def test_a_process_that_runs_on_after_a_freeze_serves_new_transfers(peer: Peer, sender: DataThread) -> None:
    process, (one, two) = peer
    assert send(sender, one, "one", TIMEOUT_S) is None
    os.kill(process.pid, signal.SIGSTOP)
    # It goes on for a moment, on another core.
    os.waitpid(process.pid, os.WUNTRACED)
    assert isinstance(send(sender, one, "one", SOON_S), TransportError)
    os.kill(process.pid, signal.SIGCONT)
    assert send(sender, two, "two", TIMEOUT_S) is None
