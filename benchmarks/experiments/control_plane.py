"""The scheduler process over a real NATS server: from a frontend's question to its reply, while many instances report;
and the centralized scheduler, which each instance waits for at every step.

Instances and frontends are one generator process: messages made beforehand, sent and received without the typed bus, so
that the scheduler is what is measured. It all shares this machine's cores: the scheduler's own CPU time says what of a
latency is its own.
"""

import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from meshift.benchmarks.cpu_time import cpu_s
from meshift.benchmarks.experiments import central_service
from meshift.benchmarks.experiments.central_service import STEP, owner_of
from meshift.benchmarks.experiments.runs import Row, print_rows
from meshift.benchmarks.experiments.settings import ExperimentSettings
from meshift.benchmarks.report import percentile
from meshift.schemas import subjects
from meshift.schemas.identity import FrontendRef
from meshift.schemas.instances import DispatchRequest, InstanceState, LoadReport, ModelInfo
from meshift.services.bus.codec import encode
from meshift.services.launcher.nats_server import NatsServer

GLOBAL_CASES = ((64, 500), (256, 1_000), (1_024, 1_000), (1_024, 2_000))
CENTRAL_CASES = ((16, 125), (64, 500), (256, 1_000))
"""Instances, and requests a second."""

REPORTS_A_SECOND = 10
PULSE_S = 0.005
"""What is due is sent as often as this."""
WARM_S = 2.0
SETTLE_S = 1.0
"""Replies may come so long after the last question."""
START_DEADLINE_S = 60.0

CAPACITY = 13_616
BATCH = 32
PROMPT_TOKENS = 128
OUTPUT_TOKENS = 128
STEP_S = 0.04
MODEL = ModelInfo(name="m", context_tokens_max=16_384, vocabulary_size=32_000, layers=32)


def measure(settings: ExperimentSettings) -> list[Row]:
    """All cases, one after another, as rows; printed, too."""
    seconds = 3.0 if settings.quick else 10.0
    rows = asyncio.run(_measure(seconds))
    for policy in ("meshift", "central"):
        print_rows([row for row in rows if row["policy"] == policy])
    return rows


async def _measure(seconds: float) -> list[Row]:
    rows = []
    for instances, rate in GLOBAL_CASES:
        async with _control_plane(_scheduler_command) as (client, pid):
            rows.append(await ask_global(client, pid, instances, rate, seconds))
    for instances, rate in CENTRAL_CASES:
        async with _control_plane(lambda url, count=instances: _central_command(url, count)) as (client, pid):  # type: ignore[misc]
            rows.append(await ask_central(client, pid, instances, rate, seconds))
    return rows


def _scheduler_command(url: str) -> Sequence[str]:
    return ("-m", "meshift.services.cli", "scheduler", "--nats", url)


def _central_command(url: str, instances: int) -> Sequence[str]:
    return ("-m", central_service.__name__, url, str(instances), str(CAPACITY // central_service.PAGE_TOKENS))


@contextlib.asynccontextmanager
async def _control_plane(command: Callable[[str], Sequence[str]]) -> AsyncIterator[tuple[Client, int]]:
    """A server, a scheduler that is ready, and the generator's connection; with the scheduler's process id."""
    with tempfile.TemporaryDirectory() as folder:
        async with NatsServer(Path(folder)) as server:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", *command(server.url), stdout=asyncio.subprocess.PIPE
            )
            client = await nats.connect(server.url)
            try:
                await asyncio.wait_for(_ready(process), START_DEADLINE_S)
                yield client, process.pid
            finally:
                await client.close()
                if process.returncode is None:
                    process.terminate()
                await process.wait()


async def _ready(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    while b"is ready" not in (line := await process.stdout.readline()):
        if not line:
            raise RuntimeError("the scheduler ended before it was ready")


@dataclass
class Questions:
    """Requests that are under way over one connection, and how long the answered ones took."""

    client: Client
    inbox: str
    sent_s: dict[str, float] = field(default_factory=dict)
    took_s: list[float] = field(default_factory=list)
    refused: int = 0
    keep: bool = False
    """Whether times count now."""
    on_reply: Callable[[str, bytes], None] = lambda name, payload: None

    async def open(self) -> None:
        """Replies come from now on."""
        await self.client.subscribe(f"{self.inbox}.*", cb=self._on_reply)

    async def ask(self, subject: str, name: str, payload: bytes) -> None:
        """Without waiting for the reply."""
        self.sent_s[name] = time.perf_counter()
        await self.client.publish(subject, payload, reply=f"{self.inbox}.{name}")

    async def _on_reply(self, message: Msg) -> None:
        name = message.subject.rpartition(".")[2]
        sent_s = self.sent_s.pop(name, None)
        if sent_s is None:
            return
        if message.headers:
            self.refused += 1
        elif self.keep:
            self.took_s.append(time.perf_counter() - sent_s)
        self.on_reply(name, message.data)


def latency(prefix: str, took_s: Sequence[float]) -> Row:
    """Columns; None where nothing was answered."""
    shares = {"p50": 0.5, "p99": 0.99}
    return {
        f"{prefix}_ms_{name}": percentile(took_s, share) * 1e3 if took_s else None for name, share in shares.items()
    }


async def ask_global(client: Client, pid: int, instances: int, rate: int, seconds: float) -> Row:
    """Instances report ten times a second, frontends ask at `rate`, whatever is still unanswered."""
    rng = random.Random(instances)
    reports = [_report_parts(rng, index) for index in range(instances)]
    questions = Questions(client, client.new_inbox())
    await questions.open()
    sequence = reported = asked = 0

    async def pulse(elapsed_s: float) -> None:
        nonlocal sequence, reported, asked
        while reported < elapsed_s * instances * REPORTS_A_SECOND:
            index = reported % instances
            sequence += index == 0
            before, after = reports[index]
            await client.publish(subjects.worker_load(owner_of(index).instance_id), before + b"%d" % sequence + after)
            reported += 1
        while elapsed_s > WARM_S and asked < (elapsed_s - WARM_S) * rate:
            await questions.ask(subjects.DISPATCH, f"q{asked}", _question(f"q{asked}"))
            asked += 1

    questions.keep = True
    busy_s = await _pulses(pulse, pid, seconds)
    await _settle(questions)
    return {
        "policy": "meshift",
        "instances": instances,
        "rate": rate,
        "sent_a_second": asked / seconds,
        **latency("dispatch", questions.took_s),
        "answered_share": len(questions.took_s) / asked,
        "refused": questions.refused,
        "scheduler_cpu_s_per_s": busy_s / seconds,
    }


async def ask_central(client: Client, pid: int, instances: int, rate: int, seconds: float) -> Row:
    """Frontends ask at `rate`; each instance asks at the end of every step, waits, and takes the next step."""
    steps = Questions(client, client.new_inbox())
    dispatches = Questions(client, client.new_inbox())
    fleet = _Fleet(instances, steps)
    steps.on_reply, dispatches.on_reply = fleet.on_step, fleet.on_dispatch
    await steps.open()
    await dispatches.open()
    subject = f"{subjects.PREFIX}.central.dispatch"
    for number in range(instances * BATCH):
        await dispatches.ask(subject, f"old{number}", _question(f"old{number}"))
    asked = 0

    async def pulse(elapsed_s: float) -> None:
        nonlocal asked
        await fleet.step_due(elapsed_s)
        if elapsed_s > WARM_S:
            dispatches.keep = steps.keep = True
        while elapsed_s > WARM_S and asked < (elapsed_s - WARM_S) * rate:
            await dispatches.ask(subject, f"q{asked}", _question(f"q{asked}"))
            asked += 1

    busy_s = await _pulses(pulse, pid, seconds)
    await _settle(dispatches)
    return {
        "policy": "central",
        "instances": instances,
        "rate": rate,
        "sent_a_second": asked / seconds,
        **latency("dispatch", dispatches.took_s),
        "answered_share": len(dispatches.took_s) / asked,
        "refused": dispatches.refused + steps.refused,
        "scheduler_cpu_s_per_s": busy_s / seconds,
        **latency("stall", steps.took_s),
        "steps_a_second": len(steps.took_s) / seconds,
        "steps_a_second_without_stalls": instances / STEP_S,
    }


class _Fleet:
    """Instances that do what the centralized scheduler says, each step of the same length."""

    def __init__(self, instances: int, steps: Questions) -> None:
        self._steps = steps
        self._left: list[dict[str, int]] = [{} for _ in range(instances)]
        self._due = [STEP_S * index / instances for index in range(instances)]
        self._waits = [False] * instances
        self._origin_s = time.perf_counter()

    async def step_due(self, elapsed_s: float) -> None:
        """The steps that have ended ask for the next one."""
        for index, due_s in enumerate(self._due):
            if self._waits[index] or due_s > elapsed_s:
                continue
            left = self._left[index]
            for request_id in left:
                left[request_id] -= 1
            finished = [request_id for request_id, tokens in left.items() if tokens <= 0]
            body = {"owner": owner_of(index), "tokens": [17] * len(left), "finished": finished}
            for request_id in finished:
                del left[request_id]
            self._waits[index] = True
            await self._steps.ask(STEP, str(index), json.dumps({"kind": "central_step_request", **body}).encode())

    def on_step(self, name: str, payload: bytes) -> None:
        """The next step of an instance begins."""
        index, told = int(name), json.loads(payload)
        left = self._left[index]
        for request_id in told["preempted"]:
            left.pop(request_id, None)
        for request_id in told["admitted"]:
            # Those that were there at the start are in the midst of their outputs.
            left[request_id] = OUTPUT_TOKENS if request_id[0] == "q" else 1 + hash(request_id) % OUTPUT_TOKENS
        self._waits[index] = False
        self._due[index] = time.perf_counter() - self._origin_s + STEP_S

    def on_dispatch(self, name: str, payload: bytes) -> None:
        """The scheduler keeps the request itself."""


async def _pulses(pulse: Callable[[float], Awaitable[None]], pid: int, seconds: float) -> float:
    """Until the time is over. Returns the scheduler's CPU seconds after the warm-up."""
    begin_s = time.perf_counter()
    busy_s: float | None = None
    while (elapsed_s := time.perf_counter() - begin_s) < WARM_S + seconds:
        if busy_s is None and elapsed_s >= WARM_S:
            busy_s = cpu_s(pid)
        await pulse(elapsed_s)
        await asyncio.sleep(PULSE_S)
    return cpu_s(pid) - (busy_s or 0.0)


async def _settle(questions: Questions) -> None:
    """Let replies come."""
    until_s = time.perf_counter() + SETTLE_S
    while questions.sent_s and time.perf_counter() < until_s:
        await asyncio.sleep(PULSE_S)


def _question(name: str) -> bytes:
    frontend = FrontendRef("frontend-1", 1)
    return encode(
        DispatchRequest(request_id=name, attempt=1, frontend=frontend, model=MODEL.name, demand=PROMPT_TOKENS)
    )


def _report_parts(rng: random.Random, index: int) -> tuple[bytes, bytes]:
    """What comes before and after the sequence number. Of an instance that has room, as most have."""
    used = rng.randrange(CAPACITY // 2)
    report = LoadReport(
        owner=owner_of(index),
        sequence=987_654_321,
        emitted_ns=0,
        state=InstanceState.READY,
        model=MODEL,
        capacity=CAPACITY,
        used=used,
        cached=0,
        free=CAPACITY - used,
        reserved=0,
        running=rng.randrange(1, BATCH),
        waiting=0,
        head_demand=0,
        queued_demand=0,
    )
    before, _, after = encode(report).partition(b"987654321")
    return before, after
