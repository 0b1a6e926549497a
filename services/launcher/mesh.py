"""A whole mesh as processes of this machine: NATS, one scheduler, one coordinator, one frontend, workers."""

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Protocol

from meshift.schemas.errors import MeshError
from meshift.services.launcher.base import ChildEvent, ChildStatus, EventHandler, LauncherError, LaunchSpec, Settings
from meshift.services.launcher.lifecycle import ENDED, ChildState
from meshift.services.launcher.local import LocalLauncher
from meshift.services.launcher.restart import Ended, Restart, RestartPolicy, decide_restart

SCHEDULER = "scheduler"
COORDINATOR = "coordinator"
FRONTEND = "frontend"

WAITING_SAID_EVERY_S = 5.0
STOP_GRACE_S = 10.0
"""Beyond its own drain deadline, a service has so long to end before it is killed."""


class BusServer(Protocol):
    """A NATS server that this process runs."""

    @property
    def url(self) -> str:
        """Where clients connect."""

    async def start(self) -> str:
        """Returns its URL when it listens; after it died once more, at the same place. Raises `MeshError`."""

    async def wait(self) -> int:
        """Until it ends; returns its exit status."""

    async def stop(self) -> None:
        """End it. Idempotent."""


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """What to run."""

    nats_url: str
    workers: int
    worker_settings: Settings
    host: str
    port: int
    log_dir: Path
    drain_deadline_s: float
    metrics_ports: Mapping[str, int] = field(default_factory=dict)
    """By instance id, for those that show their metrics. The frontend does at its REST port."""
    scheduler_settings: Settings = field(default_factory=dict)
    insecure_no_keys: bool = False
    """The frontend serves everybody what has no keys."""

    @property
    def metrics_urls(self) -> dict[str, str]:
        """Where to see them, by instance id."""
        own = {name: f"http://127.0.0.1:{port}/metrics" for name, port in self.metrics_ports.items()}
        return {FRONTEND: f"{self.url}/metrics", **own}

    @property
    def url(self) -> str:
        """Of the REST API, from this machine."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def grace_s(self) -> int:
        """The drain deadline in the frontend's whole seconds."""
        return math.ceil(self.drain_deadline_s)

    @property
    def worker_ids(self) -> list[str]:
        """`worker-1`, `worker-2`, ..."""
        return [f"worker-{number}" for number in range(1, self.workers + 1)]

    def _frontend_settings(self) -> Settings:
        settings: Settings = {"host": self.host, "port": self.port, "grace_s": self.grace_s}
        return {**settings, "insecure_no_keys": True} if self.insecure_no_keys else settings

    def specs(self) -> dict[str, LaunchSpec]:
        """All services by instance id, in the order of their launch."""
        bus: Settings = {"nats": self.nats_url}
        specs = {
            SCHEDULER: LaunchSpec("scheduler", {**bus, **self.scheduler_settings, **self._metrics(SCHEDULER)}),
            COORDINATOR: LaunchSpec("coordinator", {**bus, **self._metrics(COORDINATOR)}),
            FRONTEND: LaunchSpec("frontend", {**bus, **self._frontend_settings()}),
        }
        return specs | {instance_id: self.worker_spec(instance_id) for instance_id in self.worker_ids}

    def worker_spec(self, instance_id: str) -> LaunchSpec:
        """How to run an instance, one of the first or one that is launched later."""
        own: Settings = {
            "nats": self.nats_url,
            "instance_id": instance_id,
            "drain_deadline_s": self.drain_deadline_s,
            **self._metrics(instance_id),
        }
        return LaunchSpec("worker", {**self.worker_settings, **own})

    def _metrics(self, instance_id: str) -> Settings:
        port = self.metrics_ports.get(instance_id)
        return {"metrics_port": port} if port else {}


class LocalMesh:
    """Runs the services of a plan until it is stopped. `say` gets a line at a time for whoever watches."""

    def __init__(
        self,
        plan: MeshPlan,
        say: Callable[[str], None],
        on_change: Callable[[list[ChildStatus]], None] = lambda statuses: None,
        make_launcher: Callable[[Path, EventHandler], LocalLauncher] = LocalLauncher,
    ) -> None:
        self._plan = plan
        self._say = say
        self._on_change = on_change
        self._launcher = make_launcher(plan.log_dir, self._on_event)
        self._changed = asyncio.Event()

    @property
    def launcher(self) -> LocalLauncher:
        """What runs the services; instances may be launched and stopped by it meanwhile."""
        return self._launcher

    async def start(self) -> None:
        """Launch everything; returns when all of it is ready. Raises `LauncherError` as soon as one fails."""
        for instance_id, spec in self._plan.specs().items():
            await self._launcher.launch(instance_id, spec)
        while waiting := [status for status in self._launcher.list() if status.state is not ChildState.READY]:
            await self._next_change(waiting)
            for status in self._launcher.list():
                if status.state in ENDED:
                    await self._launcher.wait_ready(status.instance_id)

    async def until_over(self) -> str:
        """Until it can't serve any more; returns why."""
        while not (reason := why_over(self._launcher.list())):
            self._changed.clear()
            await self._changed.wait()
        return reason

    async def stop(self) -> None:
        """Drain and end: the frontend first, while its streams still have workers. Idempotent."""
        statuses = self._launcher.list()
        deadline_s = self._plan.drain_deadline_s + STOP_GRACE_S
        for group in stop_order(status.instance_id for status in statuses):
            await asyncio.gather(*(self._launcher.stop(instance_id, deadline_s) for instance_id in group))

    def kill(self) -> None:
        """End everything at once."""
        self._launcher.kill()

    async def _next_change(self, waiting: list[ChildStatus]) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(WAITING_SAID_EVERY_S):
                await self._changed.wait()
        except TimeoutError:
            self._say("waiting for " + ", ".join(status.instance_id for status in waiting))

    def _on_event(self, event: ChildEvent) -> None:
        self._on_change(self._launcher.list())
        self._say(f"{event.status.instance_id}: {event.text}")
        self._changed.set()


def stop_order(instance_ids: Iterable[str]) -> list[list[str]]:
    """Groups to stop one after another."""
    known = list(instance_ids)
    workers = [name for name in known if name not in (FRONTEND, SCHEDULER, COORDINATOR)]
    groups = [[FRONTEND], workers, [SCHEDULER, COORDINATOR]]
    return [[name for name in group if name in known] for group in groups]


def why_over(statuses: list[ChildStatus]) -> str:
    """Why a mesh of these services serves no more; empty while it does."""
    ended = [status.instance_id for status in statuses if status.state in ENDED]
    if FRONTEND in ended:
        return "the frontend is gone"
    others = (FRONTEND, SCHEDULER, COORDINATOR)
    workers = [status.instance_id for status in statuses if status.instance_id not in others]
    return "no worker is left" if set(workers) <= set(ended) else ""


async def keep_alive(server: BusServer, say: Callable[[str], None], policy: RestartPolicy = decide_restart) -> NoReturn:
    """Start a NATS server again whenever it dies, until cancelled. Raises `LauncherError` when that is in vain."""
    loop = asyncio.get_running_loop()
    failures = 0
    while True:
        since_s = loop.time()
        status = await server.wait()
        # NATS ends by our own hand alone: a clean end without that is a loss as well.
        decision = policy(Ended(status or 1, ever_ready=True, ready_s=loop.time() - since_s, failures=failures))
        if not isinstance(decision, Restart):
            raise LauncherError(f"nats ended again and again (exit status {status})")
        say(f"nats: died (exit status {status}); starting it again in {decision.delay_s:.1f} s")
        await asyncio.sleep(decision.delay_s)
        failures = decision.failures
        try:
            await server.start()
        except MeshError as error:
            say(f"nats: {error.message}")
        else:
            say("nats: started again")
