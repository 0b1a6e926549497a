"""One supervised child process: started, watched until it is ready, started again when it dies."""

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path

from meshift.services.launcher.base import ChildEvent, ChildStatus, EventHandler, LauncherError
from meshift.services.launcher.lifecycle import ENDED, ChildChange, ChildState, next_state
from meshift.services.launcher.logs import LogWatch, append_line, start_log, tail
from meshift.services.launcher.restart import Ended, GiveUp, Leave, Restart, RestartPolicy, decide_restart
from meshift.services.launcher.spawn import kill_group, signal_process, spawn

READY_TEXT = " is ready"
"""A service prints one line with this when it serves."""

READY_POLL_S = 0.05


class Child:
    """A service of this machine."""

    def __init__(
        self,
        instance_id: str,
        command: Sequence[str],
        log: Path,
        on_event: EventHandler,
        policy: RestartPolicy = decide_restart,
    ) -> None:
        self._id = instance_id
        self._policy = policy
        self._command = tuple(command)
        self._log = log
        self._on_event = on_event
        self._state = ChildState.STARTING
        self._process: asyncio.subprocess.Process | None = None
        self._watch = LogWatch(log, READY_TEXT)
        self._stop_signal = signal.SIGTERM
        self._supervision: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._restarts = 0
        self._failures = 0
        self._ever_ready = False
        self._ready_since_s: float | None = None

    async def start(self) -> None:
        """Start the process and its supervision. Raises `LauncherError` if it can't be made."""
        start_log(self._log)
        await self._spawn()
        self._supervision = asyncio.create_task(self._supervise(), name=f"supervise {self._id}")
        self._supervision.add_done_callback(lambda _: self._changed.set())

    def status(self) -> ChildStatus:
        """What it is now."""
        alive = self._process is not None and self._process.returncode is None
        pid = self._process.pid if self._process is not None and alive else None
        return ChildStatus(self._id, self._state, pid, self._restarts, self._log)

    async def wait_ready(self) -> None:
        """Until it is ready. Raises `LauncherError` when it has ended or is asked to end."""
        while self._state is not ChildState.READY:
            if self._state in ENDED or self._state is ChildState.STOPPING:
                raise LauncherError(f"{self._id} {self._state}; the end of {self._log}:\n{tail(self._log)}")
            await self._next_change()
            self._raise_if_unsupervised()

    async def stop(self, deadline_s: float) -> None:
        """Ask it to end, by force after `deadline_s`."""
        self._ask_to_stop(signal.SIGTERM)
        try:
            async with asyncio.timeout(deadline_s):
                await self._until_ended()
        except TimeoutError:
            self.kill()
            await self._until_ended()

    def kill(self) -> None:
        """End it at once, with its process group; it isn't started again."""
        self._ask_to_stop(signal.SIGKILL)

    def _ask_to_stop(self, number: signal.Signals) -> None:
        """Remember that it is to end, and how; a process that is just being made gets it in `_spawn`."""
        if self._state in ENDED:
            return
        asked_before = self._state is ChildState.STOPPING
        if asked_before and number is signal.SIGTERM:
            return
        self._stop_signal = number
        if not asked_before:
            self._change(ChildChange.STOP_ASKED, "stopping" if number is signal.SIGTERM else "killing it")
        self._send_stop_signal()

    def _send_stop_signal(self) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        if self._stop_signal is signal.SIGKILL:
            kill_group(self._process)
        else:
            signal_process(self._process, signal.SIGTERM)

    async def _until_ended(self) -> None:
        if self._supervision is not None:
            await asyncio.shield(self._supervision)

    def _raise_if_unsupervised(self) -> None:
        if self._supervision is not None and self._supervision.done() and self._state not in ENDED:
            self._supervision.result()

    async def _next_change(self) -> None:
        await self._changed.wait()

    def _change(self, change: ChildChange, text: str) -> None:
        self._state = next_state(self._state, change)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        self._on_event(ChildEvent(self.status(), text))

    async def _spawn(self) -> None:
        self._watch = LogWatch(self._log, READY_TEXT)
        self._ready_since_s = None
        self._process = None
        try:
            self._process = await spawn(self._command, {}, self._log)
        except OSError as error:
            asked = self._state is ChildState.STOPPING
            self._change(ChildChange.GONE if asked else ChildChange.GAVE_UP, f"can't be started: {error}")
            raise LauncherError(f"{self._id} can't be started: {error}") from error
        if self._state is ChildState.STOPPING:
            self._send_stop_signal()

    async def _supervise(self) -> None:
        """Until it has ended for good."""
        while True:
            status = await self._until_exit()
            if self._state is ChildState.STOPPING:
                self._change(ChildChange.GONE, "stopped")
                return
            if not await self._after_exit(status):
                return

    async def _until_exit(self) -> int:
        """Watch the running process; returns its exit status. What is left of its group is killed."""
        process = self._process
        assert process is not None
        while True:
            try:
                async with asyncio.timeout(READY_POLL_S if self._state is ChildState.STARTING else None):
                    status = await process.wait()
                    break
            except TimeoutError:
                self._look_for_ready()
        self._look_for_ready()
        kill_group(process)
        return status

    def _look_for_ready(self) -> None:
        if self._state is ChildState.STARTING and self._watch.found():
            self._ever_ready = True
            self._ready_since_s = asyncio.get_running_loop().time()
            self._change(ChildChange.SAID_READY, "ready")

    async def _after_exit(self, status: int) -> bool:
        """Do what the policy says after an unasked end; False when it isn't started again."""
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        decision = self._policy(self._ended(status))
        match decision:
            case Leave():
                self._change(ChildChange.LEFT, "left")
                return False
            case GiveUp(reason):
                self._change(ChildChange.GAVE_UP, f"died ({how}); {reason}")
                return False
            case Restart(delay_s, failures):
                self._failures = failures
                self._change(ChildChange.CRASHED, f"died ({how}); starting it again in {delay_s:.1f} s")
                return await self._restart(delay_s)

    def _ended(self, status: int) -> Ended:
        now_s = asyncio.get_running_loop().time()
        ready_s = 0.0 if self._ready_since_s is None else now_s - self._ready_since_s
        return Ended(status, self._ever_ready, ready_s, self._failures)

    async def _restart(self, delay_s: float) -> bool:
        """Wait, then start it again; False if it was asked to stop meanwhile or can't be started."""
        try:
            async with asyncio.timeout(delay_s):
                while self._state is ChildState.BACKOFF:
                    await self._next_change()
            return False
        except TimeoutError:
            pass
        self._restarts += 1
        append_line(self._log, "started again")
        self._change(ChildChange.RESTARTED, "started again")
        try:
            await self._spawn()
        except LauncherError:
            return False
        return True
