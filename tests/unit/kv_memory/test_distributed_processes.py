"""DistributedTransport between processes, over Gloo, on a rank whose operations wait for one another, as NCCL's do:
moves both ways beside inference, aborts, and the deadlock that there is without the gate."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.unit.kv_memory.rank_limits import PATCHES, TIMEOUT_S

Told = dict[str, Any]


class Host:
    """The process that forks ranks."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.unit.kv_memory.rank_host"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self.ranks: list[int] = []
        self._rest = b""

    def run(self, scenario: str, folder: Path) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write((json.dumps({"scenario": scenario, "folder": str(folder)}) + "\n").encode())
        self.ranks = self.read("processes")["processes"]

    def read(self, key: str) -> Told:
        """The next line that has that key. What a rank fails with fails the test."""
        while True:
            told: Told = json.loads(self._line())
            if told["process"] not in (*self.ranks, self._process.pid):
                # Of ranks that an earlier test has ended.
                continue
            assert "failed" not in told, told
            if key in told:
                return told

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._process.stdout], [], [], 2 * TIMEOUT_S)
            assert ready, "nobody says anything"
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            assert piece, "the host has ended"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def both(self, key: str = "received") -> list[Told]:
        """What the two ranks say last."""
        return sorted((self.read(key) for _ in range(2)), key=lambda told: int(told["rank"]))

    def kill(self, rank: int, how: signal.Signals = signal.SIGKILL) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.ranks[rank], how)

    def end_ranks(self) -> None:
        for rank in range(len(self.ranks)):
            self.kill(rank)
        self.ranks = []

    def close(self) -> None:
        self.end_ranks()
        self._process.kill()
        self._process.wait(TIMEOUT_S)


@pytest.fixture(scope="module")
def shared_host() -> Iterator[Host]:
    host = Host()
    yield host
    host.close()


@pytest.fixture
def host(shared_host: Host) -> Iterator[Host]:
    yield shared_host
    shared_host.end_ranks()


def test_both_ways_beside_inference(host: Host, tmp_path: Path) -> None:
    host.run("both_ways", tmp_path)
    for told in host.both():
        assert told["errors"] == [""] * PATCHES
        assert told["received"] == PATCHES
        assert told["steps"] > 0
        assert not told["locked"]


def test_what_is_given_up_while_the_receiver_infers_leaves_nothing(host: Host, tmp_path: Path) -> None:
    host.run("held_off", tmp_path)
    first, second = host.both()
    assert "no answer within" in first["error"]
    assert not first["locked_then"]
    assert not first["locked"]
    assert (second["received"], second["locked"]) == (0, False)


def test_a_receiver_that_waits_for_the_sender_s_next_step_gets_it_first(host: Host, tmp_path: Path) -> None:
    host.run("crossed", tmp_path)
    first, second = host.both()
    assert first["error"] == ""
    assert (second["value"], second["received"]) == (7, 1)


def test_without_the_gate_they_wait_for_each_other(host: Host, tmp_path: Path) -> None:
    """Until the deadline of what is in the library, which inference has not."""
    host.run("crossed without a guard", tmp_path)
    first, second = host.both()
    assert first["error"]
    assert (second["value"], second["received"]) == (7, 0)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_dies_or_freezes_while_it_receives(host: Host, tmp_path: Path, how: signal.Signals) -> None:
    host.run("endless", tmp_path)
    host.both("begun")
    host.kill(1, how)
    told = host.read("error")
    assert (told["rank"], told["locked"]) == (0, False)
