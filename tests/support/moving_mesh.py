"""A mesh of processes whose streams are moved about: mixed load that must come out as it does undisturbed."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from meshift.benchmarks.failover import TOPICS, chat_of
from meshift.benchmarks.mesh_process import MeshProcess
from meshift.benchmarks.rest import StreamedChat, stream_chat
from meshift.client.mesh import MeshClient
from meshift.schemas.admin import InstanceStatus
from meshift.schemas.errors import MoveDeclined, NotFound
from meshift.schemas.instances import InstanceState
from meshift.schemas.moves import MoveMode

MODES = (*[MoveMode.LIVE] * 6, MoveMode.BLOCKING, MoveMode.RECOMPUTE)
POLL_S = 0.1
SETTLE_S = 30.0
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


def mixed_chats(model: str, tokens: int, *, schemas: bool = True, variants: int = 1) -> list[dict[str, Any]]:
    """Greedy, seeded, with penalties and with a schema: whatever an undisturbed run repeats exactly. With many variants
    they don't all fit into a destination's prefix cache, so that moves copy more than what is new."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 11},
        {"max_tokens": tokens * 2},
        {"temperature": 1.0, "top_p": 0.9, "seed": 5, "frequency_penalty": 0.5},
        {"logprobs": True, "top_logprobs": 2},
        {"temperature": 0.7, "seed": 3, "max_tokens": tokens // 2},
    ]
    if schemas:
        format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        kinds.append({"temperature": 0.9, "seed": 2, "response_format": format_, "ignore_eos": False})
    pairs = list(zip(kinds, TOPICS, strict=False))
    chats = [chat_of(model, topic, tokens) | kind for _ in range(variants) for kind, topic in pairs]
    for number, chat in enumerate(chats):
        message = chat["messages"][0]
        chat["messages"] = [{**message, "content": f"{number}. {message['content']}"}]
    return chats


@dataclass
class Load:
    """Streams one after another, `width` at a time. What they give undisturbed is asked for afterwards: before, it
    would be in the prefix caches, and moves would have nothing to copy."""

    rest: httpx.AsyncClient
    chats: Sequence[dict[str, Any]]
    rng: random.Random
    width: int = 4
    got: list[tuple[int, StreamedChat]] = field(default_factory=list)
    """Place in `chats`, and what came."""
    wrong: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Load, until the block is left; then what has begun is read to its end."""
        stop = asyncio.Event()
        turn = iter(self._turns())
        tasks = [asyncio.create_task(self._client(stop, turn)) for _ in range(self.width)]
        try:
            yield
        finally:
            stop.set()
            await asyncio.gather(*tasks)

    async def check(self) -> int:
        """How many streams were what undisturbed ones are; the others are in `wrong`."""
        asked = sorted({index for index, _ in self.got})
        expected: dict[int, StreamedChat] = {}
        for begin in range(0, len(asked), self.width):
            some = asked[begin : begin + self.width]
            texts = await asyncio.gather(*(stream_chat(self.rest, self.chats[index]) for index in some))
            expected.update(zip(some, texts, strict=True))
        for index, chat in self.got:
            whole = expected[index]
            if (chat.text, chat.finish_reason) != (whole.text, whole.finish_reason):
                body = json.dumps(self.chats[index])
                self.wrong.append(f"{body}:\n{whole.text!r}\n{chat.text!r} ({chat.finish_reason})")
        return len(self.got) - len(self.wrong)

    def _turns(self) -> Iterator[int]:
        """All of them once, then again, each time in another order."""
        while True:
            yield from self.rng.sample(range(len(self.chats)), len(self.chats))

    async def _client(self, stop: asyncio.Event, turn: Iterator[int]) -> None:
        while not stop.is_set():
            index = next(turn)
            try:
                self.got.append((index, await stream_chat(self.rest, self.chats[index])))
            except (httpx.HTTPError, RuntimeError) as error:
                self.wrong.append(f"{json.dumps(self.chats[index])}: {type(error).__name__}: {error}")


@dataclass
class Mover:
    """Moves a random request somewhere, again and again."""

    mesh: MeshClient
    rng: random.Random
    outcomes: Counter[str] = field(default_factory=Counter)
    frozen_ms: list[float] = field(default_factory=list)
    byte_count: int = 0

    @property
    def moved(self) -> int:
        return self.outcomes["moved"]

    def has_moved(self, count: int) -> Callable[[], Awaitable[bool]]:
        """Whether so many moves have come about: for `until`."""

        async def has() -> bool:
            return self.moved >= count

        return has

    async def run(self, interval_s: float) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            next_s = loop.time() + interval_s
            await self.move_one()
            await asyncio.sleep(max(0.0, next_s - loop.time()))

    async def move_one(self) -> None:
        """One that is open, if there is any."""
        known = [item.request_id for item in await self.mesh.open_requests()]
        if not known:
            self.outcomes["nothing open"] += 1
            return
        try:
            report = await self.mesh.move(self.rng.choice(known), mode=self.rng.choice(MODES))
        except NotFound:
            self.outcomes["ended before"] += 1
        except MoveDeclined as error:
            self.outcomes[f"refused: {error.refusal}"] += 1
        else:
            self.outcomes[str(report.outcome) + (f": {report.refusal}" if report.refusal else "")] += 1
            if report.figures.frozen_ns:
                self.frozen_ms.append(report.figures.frozen_ns / 1e6)
            self.byte_count += report.figures.byte_count


@asynccontextmanager
async def in_background(work: Awaitable[None]) -> AsyncIterator[None]:
    """Runs beside the block, and is ended with it. What it raised fails the block."""
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


async def until(condition: Callable[[], Awaitable[bool]], what: str, deadline_s: float) -> None:
    """Polls."""
    try:
        async with asyncio.timeout(deadline_s):
            while not await condition():
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(f"{deadline_s:g} s without: {what}") from None


async def until_ready(mesh: MeshClient, count: int, deadline_s: float = 120.0) -> None:
    """So many instances take requests."""

    async def ready() -> bool:
        return sum(item.load.state is InstanceState.READY for item in await mesh.instances()) == count

    await until(ready, f"{count} instances", deadline_s)


def leftovers(item: InstanceStatus) -> dict[str, int]:
    """What an idle instance must not have."""
    load = item.load
    found = {
        "used": load.used,
        "reserved": load.reserved,
        "running": load.running,
        "waiting": load.waiting,
        "requests": item.requests,
        "unacknowledged": item.unacknowledged,
        "moves_out": item.moves_out,
        "moves_in": item.moves_in,
    }
    return {name: value for name, value in found.items() if value}


async def until_quiet(mesh: MeshClient) -> None:
    """Nothing is left anywhere: no token used or reserved, no request, no move."""

    async def quiet() -> bool:
        instances = await mesh.instances()
        return all(item.answers and not leftovers(item) for item in instances) and not await mesh.open_requests()

    try:
        await until(quiet, "quiet", SETTLE_S)
    except AssertionError:
        left = {str(item.load.owner): leftovers(item) for item in await mesh.instances()}
        raise AssertionError(f"left: {left}, {list(await mesh.open_requests())}") from None


async def resumes(rest: httpx.AsyncClient) -> float:
    """Streams that lost their owner, by the frontend's metrics."""
    lines = (await rest.get("/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("meshift_resumes_total"))


@dataclass
class Memory:
    """Resident memory of all processes, sampled."""

    samples: list[dict[str, int]] = field(default_factory=list)

    async def run(self, process: MeshProcess, mesh: MeshClient, interval_s: float) -> None:
        """Until cancelled."""
        while True:
            pids = {name: [pid] for name, pid in process.state().pids.items()}
            for item in await mesh.instances():
                pids[f"{item.load.owner.instance_id}'s ranks"] = list(item.ranks)
            self.samples.append({name: sum(map(resident_bytes, found)) for name, found in pids.items() if found})
            await asyncio.sleep(interval_s)

    def growth(self) -> dict[str, tuple[int, int]]:
        """For each, the greatest size in the second quarter of the run and in the last one, in bytes."""
        quarter = max(1, len(self.samples) // 4)
        early, late = self.samples[quarter : 2 * quarter] or self.samples, self.samples[-quarter:]
        names = sorted(set().union(*early) & set().union(*late))
        return {name: (_greatest(early, name), _greatest(late, name)) for name in names}


def _greatest(samples: Sequence[dict[str, int]], name: str) -> int:
    return max(sample.get(name, 0) for sample in samples)


def resident_bytes(pid: int) -> int:
    """Of a process; 0 if there is none."""
    try:
        fields = Path("/proc", str(pid), "status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in fields if line.startswith("VmRSS:"))
