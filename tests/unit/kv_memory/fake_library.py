"""A library of groups in one process, in torch.distributed's place: an operation waits for its peer's, can be held
where it is, and fails when the peer drops the group."""

import itertools
import threading
from collections.abc import Callable

from meshift.kv_memory.transport.base import TransportError
from meshift.kv_memory.transport.distributed.library import Meeting


class Channel:
    """Between the two ends of a group."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.payload: bytes | None = None
        self.closed = False
        self.held = False
        """Nothing crosses while it is."""

    def wait(self, until: Callable[[], bool], timeout_s: float) -> None:
        """Under the condition. Raises TransportError."""
        self.condition.wait_for(lambda: self.closed or (until() and not self.held), timeout_s)
        if self.closed:
            raise TransportError("dropped by the peer")
        if not until() or self.held:
            raise TransportError(f"nothing crossed within {timeout_s} s")

    def change(self, *, held: bool | None = None, closed: bool | None = None) -> None:
        with self.condition:
            self.held = self.held if held is None else held
            self.closed = self.closed if closed is None else closed
            self.condition.notify_all()


class FakeNetwork:
    """All libraries of one."""

    def __init__(self) -> None:
        self.channels: dict[bytes, Channel] = {}
        self.hold_new = False
        """Channels to come are held from the start."""
        self.refuse = ""
        """Why no group can be opened."""
        self._names = itertools.count()

    def make_library(self, host: str) -> "FakeLibrary":
        return FakeLibrary(self)

    def new_channel(self) -> bytes:
        name = str(next(self._names)).encode()
        channel = self.channels[name] = Channel()
        channel.held = self.hold_new
        return name

    def release(self) -> None:
        """Hold nothing any more."""
        self.hold_new = False
        for channel in self.channels.values():
            channel.change(held=False)


class FakeLibrary:
    """A `Library`."""

    def __init__(self, network: FakeNetwork) -> None:
        self._network = network

    def open(self, meeting: Meeting, *, sends: bool, timeout_s: float) -> "FakeGroup":
        if self._network.refuse:
            raise TransportError(self._network.refuse)
        if sends:
            (name,) = meeting.take(["channel"], timeout_s)
            meeting.put("sender", b"here")
        else:
            name = self._network.new_channel()
            meeting.put("channel", name)
            meeting.take(["sender"], timeout_s)
        return FakeGroup(self._network.channels[name])


class FakeGroup:
    """A `Group`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def send(self, payload: memoryview, *, timeout_s: float) -> None:
        channel = self._channel
        with channel.condition:
            channel.wait(lambda: channel.payload is None, timeout_s)
            channel.payload = bytes(payload)
            channel.condition.notify_all()
            channel.wait(lambda: channel.payload is None, timeout_s)

    def receive(self, payload: memoryview, on_entered: Callable[[], None], *, timeout_s: float) -> None:
        on_entered()
        channel = self._channel
        with channel.condition:
            channel.wait(lambda: channel.payload is not None, timeout_s)
            assert channel.payload is not None
            payload[:] = channel.payload
            channel.payload = None
            channel.condition.notify_all()

    def close(self) -> None:
        self._channel.change(closed=True)
