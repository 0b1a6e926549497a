"""`meshift up`: a whole mesh on this machine, in the foreground."""

import asyncio
import contextlib
import ipaddress
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import httpx
from pydantic import BaseModel, Field

from meshift.schemas.errors import MeshError
from meshift.services.calibration.file import load_calibration
from meshift.services.calibration.reading import CalibrationFileError
from meshift.services.cli.errors import EXIT_ERROR, CommandError
from meshift.services.cli.model import SMALL_MODEL, resolve_model
from meshift.services.cli.paths import state_folder
from meshift.services.cli.settings import parse_settings
from meshift.services.cli.state import ClusterState, only_mesh_here, process_start, write_state
from meshift.services.launcher.base import ChildStatus, LauncherError, LaunchSpec
from meshift.services.launcher.mesh import LocalMesh, MeshPlan, keep_alive
from meshift.services.launcher.nats_server import NatsServer
from meshift.services.launcher.service import LauncherOptions, LauncherService
from meshift.services.process import ServiceSettings, connect_bus, new_incarnation

LAUNCHER_ID = "launcher"

SERVING_POLL_S = 0.05
SERVING_TIMEOUT_S = 30.0
"""Between the last service's ready line and the frontend's own: it must have heard the workers' reports."""


class UpSettings(BaseModel):
    """Start NATS (unless there is one), a scheduler, a coordinator, a frontend and workers; Ctrl-C ends them all.

    The services take further settings from the environment, for example MESHIFT_CAPACITY_TOKENS
    (see `meshift worker --help`)."""

    workers: int = Field(1, ge=1, le=64, description="how many instances")
    engine: Literal["sglang", "sim"] = Field("sglang", description="the real engine, or the timing model")
    model: str = Field(SMALL_MODEL, description="a prepared model's name, or a Hugging Face folder")
    pp: int = Field(1, ge=1, description="pipeline stages of each instance")
    tp: int = Field(1, ge=1, description="tensor-parallel ranks of each stage")
    host: str = Field("127.0.0.1", description="address that the REST API listens on")
    port: int = Field(8000, ge=0, le=65535, description="its port; 0 for any free one")
    nats: str | None = Field(None, description="URL of a NATS server that runs already; without it one is started")
    log_dir: Path | None = Field(None, description="where the logs go; without it, `logs` in the state folder")
    state_dir: Path | None = Field(None, description="where its state goes; without it, `.meshift`")
    layers_per_group: int | None = Field(None, ge=1, description="see `meshift worker --help`")
    attention_backend: str | None = Field(None, description="see `meshift worker --help`")
    calibration: Path | None = Field(None, description="file of `meshift calibrate`, for workers and scheduler")
    drain_deadline_s: float = Field(30.0, ge=0, description="at the end, time for running requests")
    autoscale: bool = Field(False, description="start and drain instances by load; `meshift policy` has its settings")
    workers_min: int = Field(1, ge=1, le=64, description="with --autoscale, never fewer")
    workers_max: int = Field(4, ge=1, le=64, description="with --autoscale, never more, starting ones included")
    autoscale_dry_run: bool = Field(False, description="with --autoscale, only say what would be done")
    metrics: bool = Field(
        False, description="scheduler, coordinator and workers show metrics too, at free ports that it names"
    )


def main(name: str, arguments: list[str]) -> int:
    """Run a mesh until Ctrl-C; returns the exit status."""
    settings = parse_settings(UpSettings, f"meshift {name}", arguments)
    check_bounds(settings)
    check_calibration(settings)
    folder = (settings.state_dir or state_folder()).absolute()
    with only_mesh_here(folder):
        without_keys = no_keys_needed(settings.host)
        port = free_port(settings.host, settings.port)
        model = resolve_model(settings.model)
        return asyncio.run(Up(settings, folder, model, port, without_keys).run())


def check_bounds(settings: UpSettings) -> None:
    """Raises `CommandError` for numbers of workers that contradict each other."""
    if settings.autoscale and not settings.workers_min <= settings.workers <= settings.workers_max:
        raise CommandError(
            f"--workers {settings.workers} is not between --workers-min {settings.workers_min}"
            f" and --workers-max {settings.workers_max}"
        )


def check_calibration(settings: UpSettings) -> None:
    """Raises `CommandError` for a file that workers could not take."""
    try:
        if settings.calibration is not None:
            load_calibration(settings.calibration)
    except CalibrationFileError as error:
        raise CommandError(f"--calibration: {error}") from error


def calibration_settings(settings: UpSettings) -> dict[str, str]:
    """Of whoever takes the file; unset, their environment counts."""
    return {} if settings.calibration is None else {"calibration": str(settings.calibration.absolute())}


def scaling_settings(settings: UpSettings) -> dict[str, bool | int]:
    """What the scheduler is started with; nothing of it without --autoscale, so that its environment counts."""
    if not settings.autoscale:
        return {}
    return {
        "scheduling.scaling.enabled": True,
        "scheduling.scaling.dry_run": settings.autoscale_dry_run,
        "scheduling.scaling.instances_min": settings.workers_min,
        "scheduling.scaling.instances_max": settings.workers_max,
    }


KEY_VARIABLES = ("MESHIFT_API_KEYS", "MESHIFT_API_KEYS_FILE", "MESHIFT_INSECURE_NO_KEYS")


def no_keys_needed(host: str) -> bool:
    """Whether the frontend may serve without keys because only this machine reaches it. Raises `CommandError` if others
    do and the environment has no keys."""
    if is_loopback(host):
        return True
    if not any(os.environ.get(name) for name in KEY_VARIABLES):
        raise CommandError(f"{host} can be reached from elsewhere: set MESHIFT_API_KEYS or MESHIFT_API_KEYS_FILE")
    return False


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def free_port(host: str, port: int) -> int:
    """`port`, or any free one for 0. Raises `CommandError` if it can't be had."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise CommandError(f"can't listen on {host}:{port}: {error.strerror}; --port names another") from error
        return int(probe.getsockname()[1])


def free_metrics_ports(workers: int) -> dict[str, int]:
    """A free port for each service that has no HTTP of its own, held together while they are looked for."""
    with contextlib.ExitStack() as stack:
        names = ("scheduler", "coordinator", *(f"worker-{number}" for number in range(1, workers + 1)))
        probes = {name: stack.enter_context(socket.create_server(("127.0.0.1", 0))) for name in names}
        return {name: int(probe.getsockname()[1]) for name, probe in probes.items()}


class Up:
    """One run of `meshift up`."""

    def __init__(self, settings: UpSettings, folder: Path, model: Path, port: int, without_keys: bool) -> None:
        self._settings = settings
        self._folder = folder
        self._model = model
        self._port = port
        self._metrics_ports = free_metrics_ports(settings.workers) if settings.metrics else {}
        self._without_keys = without_keys
        self._log_dir = (settings.log_dir or folder / "logs").absolute()
        self._started_s = time.monotonic()
        self._server = NatsServer(self._log_dir) if settings.nats is None else None
        self._mesh: LocalMesh | None = None
        self._launching: LauncherService | None = None

    async def run(self) -> int:
        """Until a signal, or until the mesh can't serve any more. Leaves no process."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, stop)
        serving = asyncio.create_task(self._serve(), name="serve")
        stopping = asyncio.create_task(stop.wait(), name="wait for a signal")
        try:
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            return 0
        except (LauncherError, MeshError) as error:
            print(f"meshift up: {error}", file=sys.stderr, flush=True)
            return EXIT_ERROR
        finally:
            await self._end(serving, stopping)

    async def _serve(self) -> NoReturn:
        """Start everything and watch it. Raises `LauncherError` or `MeshError` when it can't go on."""
        if self._server is None:
            await self._serve_on(str(self._settings.nats))
        self._say("nats: starting")
        nats_url = await self._server.start()
        self._say(f"nats: ready at {nats_url}")
        await first_failure(keep_alive(self._server, self._say), self._serve_on(nats_url))

    async def _serve_on(self, nats_url: str) -> NoReturn:
        plan = self._plan(nats_url)
        write = partial(self._write_state, plan)
        self._mesh = mesh = LocalMesh(plan, self._say, write)
        self._say(f"starting {', '.join(plan.specs())}; their logs are in {self._log_dir}")
        await mesh.start()
        await self._serve_launches(plan, mesh)
        await until_serving(plan.url)
        self._announce(plan)
        raise LauncherError(await mesh.until_over())

    async def _serve_launches(self, plan: MeshPlan, mesh: LocalMesh) -> None:
        """For the scheduler, should it be told to scale now or later."""
        settings = self._settings
        bus = connect_bus(ServiceSettings(nats=plan.nats_url), LAUNCHER_ID)
        options = LauncherOptions(instances_max=settings.workers_max) if settings.autoscale else LauncherOptions()
        self._launching = LauncherService(
            LAUNCHER_ID,
            new_incarnation(),
            bus,
            mesh.launcher,
            self._spec_of(plan),
            self._model.name,
            options,
            say=self._say,
        )
        await self._launching.start()

    def _spec_of(self, plan: MeshPlan) -> Callable[[str], LaunchSpec]:
        def spec(instance_id: str) -> LaunchSpec:
            if self._settings.metrics and instance_id not in self._metrics_ports:
                self._metrics_ports[instance_id] = free_port("127.0.0.1", 0)
            return plan.worker_spec(instance_id)

        return spec

    def _plan(self, nats_url: str) -> MeshPlan:
        settings = self._settings
        measured = calibration_settings(settings)
        # Unset, a worker takes its own from the environment.
        optional = {"layers_per_group": settings.layers_per_group, "attention_backend": settings.attention_backend}
        chosen = {name: value for name, value in optional.items() if value is not None}
        return MeshPlan(
            nats_url=nats_url,
            workers=settings.workers,
            worker_settings={
                "engine": settings.engine,
                "model": str(self._model),
                "pipeline_stages": settings.pp,
                "tensor_ranks": settings.tp,
                "log_dir": str(self._log_dir),
                **chosen,
                **measured,
            },
            host=settings.host,
            port=self._port,
            log_dir=self._log_dir,
            drain_deadline_s=settings.drain_deadline_s,
            metrics_ports=self._metrics_ports,
            scheduler_settings={**scaling_settings(settings), **measured},
            insecure_no_keys=self._without_keys,
        )

    def _announce(self, plan: MeshPlan) -> None:
        message = {"role": "user", "content": "What is the capital of France?"}
        body = json.dumps({"model": self._model.name, "messages": [message], "temperature": 0})
        print(f"ready {plan.url}")
        print(f"  model {self._model.name}, {plan.workers} x {self._settings.engine}; Ctrl-C ends it. Try:")
        print(f"  curl {plan.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'", flush=True)
        for name, url in plan.metrics_urls.items():
            print(f"  metrics of {name}: {url}", flush=True)

    def _write_state(self, plan: MeshPlan, children: list[ChildStatus]) -> None:
        pids = {child.instance_id: child.pid for child in children if child.pid is not None}
        own = os.getpid()
        state = ClusterState(
            pid=own,
            pid_start=process_start(own) or 0,
            url=plan.url,
            nats_url=plan.nats_url,
            model=self._model.name,
            pids=pids,
            metrics=plan.metrics_urls,
        )
        write_state(self._folder, state)

    def _on_signal(self, stop: asyncio.Event) -> None:
        if not stop.is_set():
            self._say("stopping: running requests get their time; once more to end at once")
            stop.set()
        elif self._mesh is not None:
            self._say("ending at once")
            self._mesh.kill()

    async def _end(self, *tasks: asyncio.Task[Any]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._launching is not None:
            await self._launching.stop()
        if self._mesh is not None:
            await self._mesh.stop()
        if self._server is not None:
            await self._server.stop()
        self._say("stopped")

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._started_s:6.1f} s] {text}", flush=True)


async def first_failure(*works: Coroutine[Any, Any, NoReturn]) -> NoReturn:
    """Run all until one fails; its error is raised, the others are cancelled."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled():
            task.result()
    raise AssertionError("none of them ends without an error")


async def until_serving(url: str) -> None:
    """Until the frontend says that it can take requests. Raises `LauncherError` after `SERVING_TIMEOUT_S`."""
    last = "no answer"
    try:
        async with asyncio.timeout(SERVING_TIMEOUT_S), httpx.AsyncClient() as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    response = await client.get(f"{url}/ready")
                    if response.status_code == httpx.codes.OK:
                        return
                    last = f"{response.status_code} {response.text[:200]}"
                await asyncio.sleep(SERVING_POLL_S)
    except TimeoutError:
        raise LauncherError(f"{url}/ready says after {SERVING_TIMEOUT_S:g} s: {last}") from None
