"""Pairs of ranks that infer and move over one torch.distributed: `python -m tests.unit.kv_memory.rank_host`.

It imports torch once, and forks two ranks for each line of its input, `{"scenario": NAME, "folder": EMPTY FOLDER}`. All
write lines of JSON: the host the numbers of the processes, a rank what happens. It ends when its input does.

As NCCL has it on a device, an operation of a rank here waits for the one before it, of whatever group (`Device`); Gloo
alone would have them pass each other, and nothing could deadlock."""

import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch._C._distributed_c10d import FileStore

from meshift.kv_memory.data_thread import CHECKSUM_LATER, DataThread
from meshift.kv_memory.rectangle import Rectangle
from meshift.kv_memory.transport import Address, Patch, TransportError
from meshift.kv_memory.transport.distributed import DistributedTransport, Gate, HandshakeLimits
from meshift.kv_memory.transport.distributed.gloo import Gloo, GlooLibrary
from meshift.kv_memory.transport.distributed.library import Group, Meeting
from tests.unit.kv_memory.rank_limits import PATCHES, TIMEOUT_S

SOON_S = 0.3
PIECE_BYTES = 1 << 16
PAYLOAD_BYTES = 5 * PIECE_BYTES // 2
HOST = "127.0.0.1"


class Device:
    """One operation at a time, each until it is complete."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def await_use(self) -> None:
        """Return when an operation runs."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not self._lock.locked():
            assert time.monotonic() < deadline_s
            time.sleep(0.001)

    @contextmanager
    def operation(self, timeout_s: float) -> Iterator[None]:
        if not self._lock.acquire(timeout=timeout_s):
            raise TransportError(f"the device is busy for {timeout_s} s")
        try:
            yield
        finally:
            self._lock.release()


class DeviceLibrary:
    """A `Library` on a device."""

    def __init__(self, host: str, device: Device) -> None:
        self._inner = GlooLibrary(host)
        self._device = device

    def open(self, meeting: Meeting, *, sends: bool, timeout_s: float) -> "DeviceGroup":
        with self._device.operation(timeout_s):
            return DeviceGroup(self._inner.open(meeting, sends=sends, timeout_s=timeout_s), self._device)


class DeviceGroup:
    """A `Group` on a device."""

    def __init__(self, inner: Group, device: Device) -> None:
        self._inner = inner
        self._device = device

    def send(self, payload: memoryview, *, timeout_s: float) -> None:
        with self._device.operation(timeout_s):
            self._inner.send(payload, timeout_s=timeout_s)

    def receive(self, payload: memoryview, on_entered: Callable[[], None], *, timeout_s: float) -> None:
        # Issued; the device comes to it when it does.
        on_entered()
        with self._device.operation(timeout_s):
            self._inner.receive(payload, lambda: None, timeout_s=timeout_s)

    def close(self) -> None:
        self._inner.close()


class Rank:
    """One of the two."""

    def __init__(
        self, rank: int, folder: str, word: socket.socket, *, guarded: bool, crossing_timeout_s: float
    ) -> None:
        self.rank = rank
        self.guarded = guarded
        self.gate = Gate()
        self.device = Device()
        self._words = word.makefile("rwb", buffering=-1)
        self._gate_of_inference = self.gate if guarded else Gate()
        handshake = HandshakeLimits(PIECE_BYTES, SOON_S, crossing_timeout_s)
        self.thread = DataThread(
            lambda: DistributedTransport(
                HOST,
                rank=rank,
                gate=self.gate,
                handshake=handshake,
                make_library=lambda host: DeviceLibrary(host, self.device),
            )
        )
        self.thread.start(timeout_s=TIMEOUT_S)
        options = Gloo._Options()
        options._timeout = timedelta(seconds=TIMEOUT_S)
        options._threads = 1
        options._devices = [Gloo.create_device(hostname=HOST)]
        self._inference = Gloo(FileStore(f"{folder}/inference", 2), rank, 2, options)
        self.received = 0
        self._done: queue.SimpleQueue[TransportError | None] = queue.SimpleQueue()
        self.peer = self._meet()

    def _meet(self) -> Address:
        own = self.thread.open_transfer(f"to {self.rank}", self._take)
        self.say((json.dumps([own.scheme, own.location, own.rank, own.token]) + "\n").encode())
        return Address(*json.loads(self._words.readline()))

    def _take(self, patch: Patch) -> None:
        assert bytes(patch.payload) == payload_of(patch.watermark)
        self.received += 1

    def infer(self, sends: bool, value: int = 0, issued: Callable[[], None] = lambda: None) -> int:
        """One message of a pipeline."""
        tensor = torch.tensor([value])
        with self._gate_of_inference.inference(timeout_s=TIMEOUT_S), self.device.operation(TIMEOUT_S):
            if sends:
                work = self._inference.send([tensor], 1 - self.rank, 0)
            else:
                work = self._inference.recv([tensor], 1 - self.rank, 0)
            issued()
            work.wait(timedelta(seconds=TIMEOUT_S))
        return int(tensor.item())

    def post(self, number: int, timeout_s: float = TIMEOUT_S) -> None:
        patch = Patch(
            f"to {1 - self.rank}", number, 0, Rectangle(0, 1, 0, number, 0, 1), payload_of(number), CHECKSUM_LATER
        )
        self.thread.post(self.peer, patch, timeout_s, self._done.put)

    def posted(self) -> str:
        """How the next one ended."""
        error = self._done.get(timeout=TIMEOUT_S)
        return "" if error is None else str(error)

    def send(self, number: int, timeout_s: float = TIMEOUT_S) -> str:
        self.post(number, timeout_s)
        return self.posted()

    def say(self, word: bytes) -> None:
        self._words.write(word)
        self._words.flush()

    def hear(self, word: bytes) -> None:
        assert self._words.read(1) == word

    def tell(self, **what: object) -> None:
        write_line({"rank": self.rank, "locked": self.gate.locked, "received": self.received, **what})


def payload_of(number: int) -> bytes:
    return bytes([number % 256]) * PAYLOAD_BYTES


def write_line(what: dict[str, object]) -> None:
    os.write(1, (json.dumps({"process": os.getpid(), **what}) + "\n").encode())


# ---- scenarios ----


def both_ways(end: Rank) -> None:
    """Each sends to the other while both infer, until all is sent: stage 0 says when the last step is."""
    for number in range(1, PATCHES + 1):
        end.post(number)
    errors: list[str] = []
    mover = threading.Thread(target=lambda: errors.extend(end.posted() for _ in range(PATCHES)))
    mover.start()
    steps, last = 0, False
    while not last:
        if end.rank == 0:
            end.infer(True, steps)
            last = bool(end.infer(False)) and not mover.is_alive()
            end.infer(True, int(last))
        else:
            assert end.infer(False) == steps
            end.infer(True, int(not mover.is_alive()))
            last = bool(end.infer(False))
        steps += 1
        # The gates are open while a stage computes.
        mover.join(0.002)
    mover.join(TIMEOUT_S)
    end.tell(errors=errors, steps=steps)


def held_off(end: Rank) -> None:
    """Rank 1 waits inside for what rank 0 computes; a transfer to it, given up meanwhile, leaves nothing behind."""
    if end.rank == 1:
        assert end.infer(False, issued=lambda: end.say(b"i")) == 7
        end.hear(b"d")
        end.tell()
        return
    end.hear(b"i")
    error = end.send(1, SOON_S)
    locked = end.gate.locked
    end.infer(True, 7)
    end.say(b"d")
    end.tell(error=error, locked_then=locked)


def crossed(end: Rank) -> None:
    """Rank 1 waits inside, rank 0 begins a transfer to it, and only then sends it what it waits for."""
    if end.rank == 1:
        value = end.infer(False, issued=lambda: end.say(b"i"))
        end.hear(b"d")
        end.tell(value=value)
        return
    end.hear(b"i")
    end.post(1)
    if not end.guarded:
        end.device.await_use()
    end.infer(True, 7)
    error = end.posted()
    end.say(b"d")
    end.tell(error=error)


def endless(end: Rank) -> None:
    """Both send until something fails."""
    number, error = 0, ""
    while not error:
        number += 1
        error = end.send(number, 3 * SOON_S)
        if number == 1:
            end.tell(begun=True)
    end.thread.close(timeout_s=TIMEOUT_S)
    end.tell(error=error)


SCENARIOS: dict[str, tuple[Callable[[Rank], None], bool, float]] = {
    "both_ways": (both_ways, True, TIMEOUT_S),
    "held_off": (held_off, True, TIMEOUT_S),
    "crossed": (crossed, True, TIMEOUT_S),
    "crossed without a guard": (crossed, False, SOON_S),
    "endless": (endless, True, SOON_S),
}
"""With what guards inference, and the deadline of what is in the library."""


def run_rank(rank: int, word: socket.socket, scenario: str, folder: str) -> None:
    run, guarded, crossing_timeout_s = SCENARIOS[scenario]
    end = Rank(rank, folder, word, guarded=guarded, crossing_timeout_s=crossing_timeout_s)
    run(end)
    end.thread.close(timeout_s=TIMEOUT_S)


def fork_rank(rank: int, words: tuple[socket.socket, socket.socket], scenario: str, folder: str) -> int:
    number = os.fork()
    if number:
        return number
    try:
        words[1 - rank].close()
        run_rank(rank, words[rank], scenario, folder)
    except BaseException as error:
        write_line({"rank": rank, "failed": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(0)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        order = json.loads(line)
        words = socket.socketpair()
        numbers = [fork_rank(rank, words, order["scenario"], order["folder"]) for rank in range(2)]
        for word in words:
            word.close()
        write_line({"processes": numbers})


if __name__ == "__main__":
    main()
