"""The library torch.distributed, with its backend Gloo, on CPU memory: the one place here that imports torch.

Each pair of a sender and a receiver has a process group of its own, outside the default one: Gloo closes a whole group
when one operation in it runs out of time, and this must not be inference's. Operations are waited for, always: to drop
a buffer of an operation that runs ends the process."""

import ctypes
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroupGloo, Work

from meshift.kv_memory.transport.base import TransportError
from meshift.kv_memory.transport.distributed.library import Meeting

Gloo: Any = ProcessGroupGloo
"""torch's own types leave most of it out."""

_RECEIVER, _SENDER = 0, 1
"""Ranks in a group."""

_TAG = 1


class MeetingStore(Store):
    """A meeting, as torch.distributed wants it. (A `TCPStore` looks names up, which may take seconds, and serves
    whoever connects.)"""

    def __init__(self, meeting: Meeting, timeout_s: float) -> None:
        super().__init__()
        self._meeting = meeting
        self._timeout_s = timeout_s

    def set(self, key: str, value: Any) -> None:
        """As `Store.set`; `value` is bytes, whatever torch's types say."""
        self._meeting.put(key, value)

    def get(self, key: str) -> bytes:
        """As `Store.get`."""
        return self._meeting.take([key], self._timeout_s)[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """As `Store.wait`, with one timeout for all."""
        self._meeting.take(keys, self._timeout_s)

    def check(self, keys: list[str]) -> bool:
        """As `Store.check`."""
        return self._meeting.knows(keys)


class GlooGroup:
    """A `Group`."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def send(self, payload: memoryview, *, timeout_s: float) -> None:
        """As `Group.send`."""
        _finish(lambda: self._running().send([_tensor(payload)], _RECEIVER, _TAG), lambda: None, timeout_s)

    def receive(self, payload: memoryview, on_entered: Callable[[], None], *, timeout_s: float) -> None:
        """As `Group.receive`."""
        _finish(lambda: self._running().recv([_tensor(payload)], _SENDER, _TAG), on_entered, timeout_s)

    def close(self) -> None:
        """As `Group.close`. Idempotent."""
        # Gloo has no other way: its connections close with the last reference.
        self._group = None

    def _running(self) -> Any:
        if self._group is None:
            raise TransportError("the group is closed")
        return self._group


class GlooLibrary:
    """A `Library`."""

    def __init__(self, host: str) -> None:
        """`host`: an IP address of this machine, at which peers reach it. Raises TransportError."""
        try:
            self._device = Gloo.create_device(hostname=host)
        except RuntimeError as error:
            raise TransportError(f"torch.distributed: {_reason(error)}") from None

    def open(self, meeting: Meeting, *, sends: bool, timeout_s: float) -> GlooGroup:
        """As `Library.open`."""
        options = Gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        options._devices = [self._device]
        store = MeetingStore(meeting, timeout_s)
        try:
            return GlooGroup(Gloo(store, _SENDER if sends else _RECEIVER, 2, options))
        except RuntimeError as error:
            raise TransportError(f"torch.distributed: {_reason(error)}") from None


def _finish(begin: Callable[[], Work], on_entered: Callable[[], None], timeout_s: float) -> None:
    try:
        work = begin()
        on_entered()
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise TransportError(f"torch.distributed: {_reason(error)}") from None


def _tensor(payload: memoryview) -> torch.Tensor:
    """On the same memory, which the caller keeps. By its address, since torch warns of memory that can't be written,
    which a send only reads."""
    address = np.frombuffer(payload, np.uint8).ctypes.data
    return torch.frombuffer((ctypes.c_ubyte * payload.nbytes).from_address(address), dtype=torch.uint8)


def _reason(error: RuntimeError) -> str:
    """The first line, without the place in Gloo's source."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return line.split("] ", 1)[-1] if line.startswith("[") else line
