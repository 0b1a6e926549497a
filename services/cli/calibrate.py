"""`meshift calibrate`: measures an instance on the user's own hardware and model, and writes what policies and
simulations take from that."""

import asyncio
import contextlib
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from meshift.schemas import subjects
from meshift.schemas.errors import MeshError
from meshift.schemas.identity import FrontendRef
from meshift.schemas.memory import MemoryReply, MemoryRequest
from meshift.services.bus.base import Bus
from meshift.services.calibration.file import Calibration, write_calibration
from meshift.services.calibration.fit import FitError
from meshift.services.calibration.measuring import Sample, Subject, evaluate, measure, warm_up
from meshift.services.calibration.plan import Cell, PlanError, Room, passes, plan
from meshift.services.calibration.probe import ASK_TIMEOUT_S, InstanceProbe, ProbeError
from meshift.services.calibration.record import Record, RecordError
from meshift.services.calibration.targets import Target, TargetError, check_targets, parse_target
from meshift.services.cli.client import joined_bus
from meshift.services.cli.errors import EXIT_ERROR, EXIT_USAGE, CommandError
from meshift.services.cli.find import BusClientSettings
from meshift.services.cli.model import SMALL_MODEL, resolve_model
from meshift.services.cli.settings import parse_settings
from meshift.services.cli.tables import table
from meshift.services.launcher.base import LauncherError, LaunchSpec
from meshift.services.launcher.local import LocalLauncher
from meshift.services.launcher.nats_server import NatsServer
from meshift.services.process import new_incarnation

OWN_INSTANCE = "calibrated"
STOP_DEADLINE_S = 15.0


class CalibrateSettings(BusClientSettings):
    """Measure how long an instance's steps take, and up to which load a class of requests stays as fast as it should
    be. With --instance, an idle one of a running mesh; else one that is started for it, with further settings from the
    environment, for example MESHIFT_CAPACITY_TOKENS (see `meshift worker --help`).

    The file is for `meshift up --calibration FILE` and `meshift simulate --calibration FILE`."""

    out: Path = Field(Path("calibration.json"), description="write the result here, the measurements beside it")
    instance: str | None = Field(None, description="measure this one of a running mesh; it must be idle")
    model: str = Field(SMALL_MODEL, description="of the instance that is started: a prepared model's name, or a folder")
    engine: Literal["sglang", "sim"] = Field("sglang", description="of the instance that is started")
    target: tuple[str, ...] = Field(
        ("high=1.2x",),
        min_length=1,
        description="classes and the latency a token that each shall have: NAME=1.2x (of a request that is alone) or"
        " NAME=40ms; NAME:PRIORITY=... for classes of your own",
    )
    request_tokens: int = Field(256, ge=16, description="prompt of a typical request: loads are made of these")
    requests_max: int = Field(32, ge=2, description="most requests at once")
    percentile: float = Field(50.0, gt=0, lt=100, description="of the steps at a load, that targets hold for")
    quick: bool = Field(False, description="once instead of three times, and fewer lengths: about a minute")
    resume: bool = Field(False, description="go on with the measurements of a calibration that was broken off")
    seed: int = Field(0, description="of the prompts")
    stall_s: float = Field(120.0, gt=0, description="silence of the instance after which it is given up")


def main(name: str, arguments: list[str]) -> int:
    """Measure, write, and print the table."""
    settings = parse_settings(CalibrateSettings, f"meshift {name}", arguments)
    targets = parse_targets(settings.target)
    if settings.out.is_dir() or not settings.out.absolute().parent.is_dir():
        raise CommandError(f"--out {settings.out}: no file can be written there", EXIT_USAGE)
    try:
        calibration = asyncio.run(_calibrate(settings, targets))
        write_calibration(settings.out, calibration)
    except (ProbeError, PlanError, FitError, TargetError, RecordError, LauncherError, MeshError, OSError) as error:
        raise CommandError(str(error), EXIT_ERROR) from error
    print(report(calibration))
    print(f"written to {settings.out}")
    return 0


def parse_targets(words: Sequence[str]) -> list[Target]:
    """Raises CommandError."""
    try:
        targets = [parse_target(word) for word in words]
        check_targets(targets)
    except TargetError as error:
        raise CommandError(f"--target: {error}", EXIT_USAGE) from error
    return targets


async def _calibrate(settings: CalibrateSettings, targets: Sequence[Target]) -> Calibration:
    if settings.instance is not None:
        async with joined_bus(settings.nats_url()) as bus:
            return await calibrate(bus, settings.instance, settings, targets)
    async with own_instance(settings) as nats_url, joined_bus(nats_url) as bus:
        return await calibrate(bus, OWN_INSTANCE, settings, targets)


@contextlib.asynccontextmanager
async def own_instance(settings: CalibrateSettings) -> AsyncIterator[str]:
    """A NATS server and one worker, ended afterwards. Raises LauncherError, MeshError."""
    model = resolve_model(settings.model)
    with tempfile.TemporaryDirectory(prefix="meshift-calibrate-") as name:
        folder = Path(name)
        server, launcher = NatsServer(folder), LocalLauncher(folder)
        try:
            nats_url = await server.start()
            print(f"starting {settings.engine} with {model.name}...", flush=True)
            own = {"nats": nats_url, "instance_id": OWN_INSTANCE, "engine": settings.engine, "model": str(model)}
            await launcher.launch(OWN_INSTANCE, LaunchSpec("worker", {**own, "log_dir": name}))
            await launcher.wait_ready(OWN_INSTANCE)
            yield nats_url
        finally:
            for status in launcher.list():
                await launcher.stop(status.instance_id, STOP_DEADLINE_S)
            await server.stop()


async def calibrate(bus: Bus, instance_id: str, settings: CalibrateSettings, targets: Sequence[Target]) -> Calibration:
    """Of a live instance. Raises FitError, TargetError, and as `take_samples`."""
    subject, samples = await take_samples(bus, instance_id, settings)
    return evaluate(samples, subject, targets)


async def take_samples(bus: Bus, instance_id: str, settings: CalibrateSettings) -> tuple[Subject, list[Sample]]:
    """Measure a live instance. Raises ProbeError, PlanError, RecordError, MeshError, OSError."""
    incarnation = new_incarnation()
    ref = FrontendRef(frontend_id=f"calibrate-{incarnation}", incarnation=incarnation)
    probe = InstanceProbe(bus, ref, random.Random(settings.seed), settings.stall_s)
    try:
        await probe.start(instance_id)
        subject = await subject_of(bus, probe, settings)
        room = Room(subject.capacity, probe.report.model.context_tokens_max)
        cells = plan(room, settings.request_tokens, settings.requests_max, settings.quick)
        record = Record(Record.path_of(settings.out), header_of(subject, settings))
        known = record.begin(settings.resume)
        await warm_up(probe, settings.request_tokens)
        return subject, await measure(probe, told(passes(cells, settings.quick)), known, record.keep)
    finally:
        probe.stop()


async def subject_of(bus: Bus, probe: InstanceProbe, settings: CalibrateSettings) -> Subject:
    """What is measured, by its own word."""
    subject = subjects.worker_memory(probe.owner.instance_id)
    memory = await bus.request(subject, MemoryRequest(), MemoryReply, timeout_s=ASK_TIMEOUT_S)
    return Subject(
        model=probe.report.model.name,
        engine=probe.engine,
        capacity=probe.report.capacity,
        page_size=memory.page_tokens,
        request_tokens=settings.request_tokens,
        percentile=settings.percentile,
    )


def header_of(subject: Subject, settings: CalibrateSettings) -> dict[str, Any]:
    """What samples must have in common to be fitted together. What is made of them may change: targets, percentile."""
    return {
        "model": subject.model,
        "engine": subject.engine,
        "capacity": subject.capacity,
        "page_size": subject.page_size,
        "request_tokens": settings.request_tokens,
    }


def told(cells: Iterable[tuple[int, Cell]]) -> Iterator[tuple[int, Cell]]:
    """The same; on a terminal each is shown as it begins."""
    for number, cell in cells:
        if sys.stderr.isatty():
            print(f"\r\x1b[Kpass {number + 1}: {cell.name}", end="", file=sys.stderr, flush=True)
        yield number, cell
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def report(calibration: Calibration) -> str:
    """For people."""
    parameters, quality = calibration.parameters, calibration.quality
    step = (parameters.decode_step_ns, parameters.decode_request_ns, parameters.decode_token_ns)
    shared = f", {parameters.decode_shared_ns / 1e6:.3g} more for two and up" if parameters.decode_shared_ns else ""
    prompt = (parameters.prefill_batch_ns, parameters.prefill_token_ns, parameters.prefill_token_squared_ns)
    rows = [
        [
            "decode step, ms",
            "{:.3g} + {:.3g} * requests + {:.3g} * tokens".format(*(value / 1e6 for value in step)) + shared,
        ],
        *_growth(calibration),
        ["prefill, ms", "{:.3g} + {:.3g} * tokens + {:.3g} * tokens^2".format(*(value / 1e6 for value in prompt))],
        ["decode error, P50 and most", f"{quality.decode_error_p50:.1%}, {quality.decode_error_max:.1%}"],
        ["prefill error, P50 and most", f"{quality.prefill_error_p50:.1%}, {quality.prefill_error_max:.1%}"],
    ]
    model = table(("MODEL", f"{calibration.model}, {calibration.engine}, {calibration.capacity} tokens"), rows)
    curve = table(
        ("LOAD", "MS A TOKEN"), [[str(tokens), f"{ms:.1f}"] for tokens, ms in calibration.loads], ("LOAD", "MS A TOKEN")
    )
    return "\n\n".join((model, curve, _classes(calibration)))


def _growth(calibration: Calibration) -> list[list[str]]:
    growth = calibration.step_growth
    if growth is None:
        return []
    times, tokens = f"{growth.full_step_times:.3g} times as long", f"{growth.request_tokens:.0f} tokens"
    return [["decode step grows", f"{times} at full memory; a request weighs {tokens}"]]


def _classes(calibration: Calibration) -> str:
    rows = []
    for item in calibration.virtual_usage.classes:
        limit = calibration.limits_ms.get(item.name)
        load = "none: no target" if limit is None else f"none: held up to {calibration.loads[-1][0]} tokens"
        load = load if item.target_load is None else f"{item.target_load} tokens"
        rows.append([item.name, str(item.execution), "-" if limit is None else f"{limit:.1f} ms", load])
    return table(("CLASS", "PRIORITY", "A TOKEN", "TARGET LOAD"), rows, ("PRIORITY", "A TOKEN"))
