"""Processes: the command, run to its end; and those that aren't children of the test, waited for."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping


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


async def run_meshift(
    *arguments: str, deadline_s: float, environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Run `meshift` as a user does, in this environment if no other is given; its exit status and output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "meshift.services.cli", *arguments,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env=environment,
    )  # fmt: skip
    try:
        async with asyncio.timeout(deadline_s):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return process.returncode, output.decode()
