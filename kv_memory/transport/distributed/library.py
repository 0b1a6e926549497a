"""What the handshake guards: groups of two ranks in a library, and how both ends of a new one meet."""

import struct
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from meshift.kv_memory.transport.base import TransportError
from meshift.kv_memory.transport.frames import FrameError

KEYS_MAX = 16
"""That a peer may say in one meeting."""

_KEY = struct.Struct("!H")

Say = Callable[[bytes], None]


class Meeting:
    """Where both ends of a new group find each other: keys and values, over the control channel. Thread-safe."""

    def __init__(self, say: Say) -> None:
        """`say` brings bytes to the peer's `hear`."""
        self._say = say
        self._condition = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._heard = 0
        self._cancelled = False

    def put(self, key: str, value: bytes) -> None:
        """Known here and there."""
        name = key.encode()
        self._keep(key, value)
        self._say(_KEY.pack(len(name)) + name + value)

    def take(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """Their values, once all are known. Raises TransportError after that time, and when it is cancelled."""
        with self._condition:
            self._condition.wait_for(lambda: self._cancelled or self._knows(keys), timeout_s)
            if self._cancelled:
                raise TransportError("cancelled")
            if not self._knows(keys):
                raise TransportError(f"the peer didn't come within {timeout_s} s")
            return [self._values[key] for key in keys]

    def knows(self, keys: Sequence[str]) -> bool:
        """Whether all are known."""
        with self._condition:
            return self._knows(keys)

    def hear(self, body: bytes) -> None:
        """The peer has said something. Raises FrameError."""
        if len(body) < _KEY.size or self._heard >= KEYS_MAX:
            raise FrameError("nothing that a meeting needs")
        self._heard += 1
        (name_bytes,) = _KEY.unpack(body[: _KEY.size])
        name, value = body[_KEY.size :][:name_bytes], body[_KEY.size + name_bytes :]
        self._keep(name.decode(errors="replace"), value)

    def cancel(self) -> None:
        """Nobody waits any more. Idempotent."""
        with self._condition:
            self._cancelled = True
            self._condition.notify_all()

    @property
    def cancelled(self) -> bool:
        """Whether it was."""
        return self._cancelled

    def _knows(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def _keep(self, key: str, value: bytes) -> None:
        with self._condition:
            self._values[key] = value
            self._condition.notify_all()


class Group(Protocol):
    """A sender and a receiver in the library. Calls are the library thread's; they raise TransportError, and the group
    is of no use then."""

    def send(self, payload: memoryview, *, timeout_s: float) -> None:
        """Returns when the payload may be written again."""

    def receive(self, payload: memoryview, on_entered: Callable[[], None], *, timeout_s: float) -> None:
        """Returns when the payload is here. `on_entered` is called once the operation is in the library."""

    def close(self) -> None:
        """Drop it: the peer's operations in it fail. Not while an operation of this end runs."""


class Library(Protocol):
    """One per end. Calls are the library thread's."""

    def open(self, meeting: Meeting, *, sends: bool, timeout_s: float) -> Group:
        """A group of this end and of the meeting's other. An operation of the library: both ends wait for each other in
        it. Raises TransportError."""


MakeLibrary = Callable[[str], Library]
"""For the host at which this end is reached."""
