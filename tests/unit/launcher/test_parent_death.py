"""A launcher that is killed takes its children with it."""

import asyncio
import signal
import sys
from pathlib import Path

from tests.support.processes import watched

DEADLINE_S = 20.0

PARENT = """
import asyncio, sys
from pathlib import Path
from meshift.services.launcher import LaunchSpec, LocalLauncher

async def main():
    script = "echo x is ready; exec sleep 600"
    launcher = LocalLauncher(Path(sys.argv[1]), command_of=lambda _: ["/bin/sh", "-c", script])
    await launcher.launch("child", LaunchSpec("x"))
    await launcher.wait_ready("child")
    print(launcher.list()[0].pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_children_die_with_a_killed_parent(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", PARENT, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        child = int(await parent.stdout.readline())
        with watched(child) as gone:
            assert not gone.is_set()
            parent.send_signal(signal.SIGKILL)
            await parent.wait()
            await gone.wait()
