"""A launcher on the bus: starts and stops instances for the scheduler, which decides how many there are.

A launch says how many there shall be, so that it starts one however often, and by however many schedulers, it is asked.
A start that fails is counted, and holds the next one off for a while: it never blocks what runs.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field

from meshift.schemas import subjects
from meshift.schemas.errors import MeshError, NotFound, Overloaded, PeerGone, Stale
from meshift.schemas.identity import Owner
from meshift.schemas.instances import DrainReply, DrainRequest
from meshift.schemas.launching import (
    LaunchedInstance,
    LauncherReport,
    LaunchReply,
    LaunchRequest,
    LaunchState,
    ReleaseRequest,
)
from meshift.schemas.limits import LAUNCHED_MAX, REASON_CHARS_MAX
from meshift.services.bus.base import Bus, ServiceInfo
from meshift.services.launcher.base import ChildStatus, Launcher, LauncherError, LaunchSpec
from meshift.services.launcher.lifecycle import ENDED, ChildState
from meshift.services.periodic import Periodic

logger = logging.getLogger(__name__)

BACKOFF_FACTOR = 2.0
LOOK_S = 0.1
"""How often a process that is to end is looked at."""

SpecOf = Callable[[str], LaunchSpec]
"""How to run an instance of that name."""


class LauncherOptions(BaseModel):
    """What a launcher may do, and when."""

    instances_max: int = Field(64, ge=1, le=LAUNCHED_MAX, description="never more, whatever the scheduler asks for")
    report_interval_s: float = Field(0.5, gt=0, description="how often it says what it runs")
    backoff_first_s: float = Field(5.0, gt=0, description="after a start that failed; doubled with each in a row")
    backoff_max_s: float = Field(300.0, gt=0, description="the longest of these")
    drain_timeout_s: float = Field(2.0, gt=0, description="deadline of the order to drain")
    grace_s: float = Field(10.0, ge=0, description="beyond its drain's deadline, until it is stopped by force")


def backoff_s(failures: int, options: LauncherOptions) -> float:
    """After so many starts in a row that failed."""
    if not failures:
        return 0.0
    # Beyond a few doublings it is the longest anyway; a float has no room for thousands of them.
    return min(options.backoff_first_s * BACKOFF_FACTOR ** min(failures - 1, 32), options.backoff_max_s)


@dataclass(slots=True)
class _Known:
    """What is remembered of an instance beside its process."""

    state: LaunchState
    since_s: float
    coming: bool = False
    """A task brings it up, and says what becomes of it: its process may not exist yet, or be an earlier one's."""


class LauncherService:
    """One launcher. `model`: what its instances serve. Those whose names `is_instance` are its own, whoever had them
    launched."""

    def __init__(
        self,
        launcher_id: str,
        incarnation: int,
        bus: Bus,
        launcher: Launcher,
        spec_of: SpecOf,
        model: str,
        options: LauncherOptions,
        is_instance: Callable[[str], bool] = lambda name: name.startswith("worker-"),
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._id = subjects.check_name(launcher_id)
        self._incarnation = incarnation
        self._bus = bus
        self._launcher = launcher
        self._spec_of = spec_of
        self._model = model
        self._options = options
        self._is_instance = is_instance
        self._say = say
        self._known: dict[str, _Known] = {}
        self._scheduler = 0
        self._sequence = 0
        self._failures_in_a_row = 0
        self._not_before_s = 0.0
        self._last_failure = ""
        self._start_s = 0.0
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._periodic = Periodic(options.report_interval_s, self._publish)
        self.launches = 0
        self.failures = 0

    async def start(self) -> None:
        """Join the bus."""
        self._bus.serve("launch", subjects.launcher_launch(self._id), LaunchRequest, self._on_launch)
        self._bus.serve("release", subjects.launcher_release(self._id), ReleaseRequest, self._on_release)
        await self._bus.start(ServiceInfo("launcher", self._id, "starts and stops instances"))
        self._publish()
        self._periodic.start()

    async def stop(self) -> None:
        """Begin nothing more and leave the bus; what runs goes on. Idempotent."""
        self._periodic.stop()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._bus.close()

    def report(self) -> LauncherReport:
        """What it runs, now."""
        now_s = self._now_s()
        self._look(now_s)
        self._sequence += 1
        return LauncherReport(
            launcher_id=self._id,
            incarnation=self._incarnation,
            sequence=self._sequence,
            model=self._model,
            instances=tuple(
                LaunchedInstance(instance_id=name, state=known.state, state_s=max(0.0, now_s - known.since_s))
                for name, known in sorted(self._known.items())
            ),
            instances_max=self._options.instances_max,
            launches=self.launches,
            failures=self.failures,
            backoff_s=max(0.0, self._not_before_s - now_s),
            last_failure=self._last_failure[:REASON_CHARS_MAX],
            start_s=self._start_s,
        )

    # ---- what schedulers ask

    def _on_launch(self, request: LaunchRequest) -> LaunchReply:
        self._obey(request.scheduler_id, request.incarnation)
        now_s = self._now_s()
        self._look(now_s)
        held = [name for name, known in self._known.items() if known.state is not LaunchState.RELEASING]
        if len(held) >= request.instances:
            return LaunchReply(instance_id="", report=self.report())
        if len(self._known) >= self._options.instances_max:
            raise Overloaded(f"{len(self._known)} instances run here, the most that {self._id} may have")
        if now_s < self._not_before_s:
            wait_s = self._not_before_s - now_s
            raise Overloaded(f"{self._failures_in_a_row} starts in a row failed; the next in {wait_s:.0f} s")
        name = self._free_name()
        self._known[name] = _Known(LaunchState.STARTING, now_s, coming=True)
        self.launches += 1
        self._say(f"{name}: launched for {request.scheduler_id}, which wants {request.instances} instances")
        self._spawn(self._bring_up(name, request.timeout_s))
        return LaunchReply(instance_id=name, report=self.report())

    def _on_release(self, request: ReleaseRequest) -> LaunchReply:
        self._obey(request.scheduler_id, request.incarnation)
        now_s = self._now_s()
        self._look(now_s)
        name = request.owner.instance_id
        known = self._known.get(name)
        if known is None:
            raise NotFound(f"{name} is not run by {self._id}", param="owner")
        if known.state is not LaunchState.RELEASING:
            self._known[name] = _Known(LaunchState.RELEASING, now_s)
            self._say(f"{name}: released by {request.scheduler_id}; it gives its requests away")
            self._spawn(self._release(request.owner, request.deadline_s))
        return LaunchReply(instance_id=name, report=self.report())

    def _obey(self, scheduler_id: str, incarnation: int) -> None:
        """Of two schedulers the newest decides."""
        if incarnation < self._scheduler:
            raise Stale(f"{scheduler_id}#{incarnation} is superseded by #{self._scheduler}")
        self._scheduler = incarnation

    # ---- what it does

    async def _bring_up(self, name: str, timeout_s: float) -> None:
        why = ""
        try:
            async with asyncio.timeout(timeout_s):
                name = self._named(name, await self._launcher.launch(name, self._spec_of(name)))
                await self._launcher.wait_ready(name)
        except TimeoutError:
            why = f"{name} wasn't ready in {timeout_s:g} s"
        except LauncherError as error:
            why = str(error)
        known = self._known.get(name)
        if known is None or not known.coming:
            # Its own reports were sooner than what its launcher waits for, and it has been released since.
            return
        if why:
            await self._failed(name, why)
        else:
            self._failures_in_a_row = 0
            self._last_failure = ""
            known.coming = False
        self._publish()

    def _named(self, asked: str, name: str) -> str:
        """It is called so from now on."""
        if name != asked:
            self._known[name] = self._known.pop(asked)
            self._say(f"{asked}: it is {name}")
        return name

    async def _failed(self, name: str, why: str) -> None:
        self.failures += 1
        self._failures_in_a_row += 1
        wait_s = backoff_s(self._failures_in_a_row, self._options)
        self._not_before_s = self._now_s() + wait_s
        self._last_failure = why
        self._say(f"{name}: the start failed; none is tried for {wait_s:g} s: {why}")
        await self._stop_process(name, 0.0)
        self._known.pop(name, None)

    async def _release(self, owner: Owner, deadline_s: float) -> None:
        """Drain it, so that its requests move, and stop it when it has left, or at the deadline."""
        name = owner.instance_id
        until_s = self._now_s() + deadline_s + self._options.grace_s
        subject = subjects.worker_drain(name)
        await self._retire(name)
        try:
            order = DrainRequest(deadline_s=deadline_s)
            await self._bus.request(subject, order, DrainReply, timeout_s=self._options.drain_timeout_s)
        except PeerGone:
            logger.info("%s is gone already", owner)
        except MeshError as error:
            logger.warning("%s doesn't drain, and is stopped: %s", owner, error)
        else:
            # One that died while draining is to end, not to be started again: any state but this one ends the wait.
            while self._state_of(name) is ChildState.READY and self._now_s() < until_s:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
        await self._stop_process(name, self._options.grace_s)
        self._known.pop(name, None)
        self._say(f"{name}: released")
        self._publish()

    async def _retire(self, name: str) -> None:
        try:
            await self._launcher.retire(name)
        except LauncherError as error:
            logger.warning("%s may be started again when it has drained: %s", name, error)

    async def _stop_process(self, name: str, deadline_s: float) -> None:
        try:
            await self._launcher.stop(name, deadline_s)
        except LauncherError as error:
            logger.info("%s: nothing to stop: %s", name, error)

    # ---- what runs

    def _look(self, now_s: float) -> None:
        """Take in what the processes have come to: those that others launched, that left, that died for good."""
        for status in self._launcher.list():
            name = status.instance_id
            if not self._is_instance(name):
                continue
            known = self._known.get(name)
            if known is not None and known.state is LaunchState.RELEASING:
                continue
            state = _launch_state(status)
            if state is None:
                if known is not None and not known.coming:
                    del self._known[name]
            elif known is None:
                self._known[name] = _Known(state, now_s)
            elif known.state is not state:
                if known.state is LaunchState.STARTING and state is LaunchState.READY:
                    self._start_s = now_s - known.since_s
                known.state, known.since_s = state, now_s

    def _state_of(self, name: str) -> ChildState | None:
        return next((status.state for status in self._launcher.list() if status.instance_id == name), None)

    def _free_name(self) -> str:
        running = {status.instance_id for status in self._launcher.list() if status.state not in ENDED}
        number = 1
        while f"worker-{number}" in running or f"worker-{number}" in self._known:
            number += 1
        return f"worker-{number}"

    def _publish(self) -> None:
        self._bus.publish(subjects.LAUNCHER, self.report())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._after)

    def _after(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a launch or release failed unexpectedly", exc_info=task.exception())

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


def _launch_state(status: ChildStatus) -> LaunchState | None:
    """None: it is gone."""
    if status.state is ChildState.READY:
        return LaunchState.READY
    if status.state in (ChildState.STARTING, ChildState.BACKOFF):
        return LaunchState.STARTING
    return LaunchState.RELEASING if status.state is ChildState.STOPPING else None
