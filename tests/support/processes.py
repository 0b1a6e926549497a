"""Waits for processes that aren't children of the test."""

import asyncio
import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def watched(pid: int) -> Iterator[asyncio.Event]:
    """An event that is set when the process ends, even if nobody has collected it yet."""
    gone = asyncio.Event()
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        gone.set()
        yield gone
        return
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, gone.set)
    try:
        yield gone
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
