"""The typed bus against bare nats-py: messages a second, and round trips. One server, one process, in turn."""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from pydantic import Field

from meshift.benchmarks.report import BenchmarkSettings, percentile, print_table, write_result
from meshift.schemas.base import pack_tokens
from meshift.schemas.identity import Owner
from meshift.schemas.requests import ReplayReply, ReplayRequest, ReplayState, TokenBatch
from meshift.services.bus.base import Bus, ServiceInfo
from meshift.services.bus.codec import encode
from meshift.services.bus.nats import NatsBus
from meshift.services.bus.nats_settings import NatsSettings
from meshift.services.cli.settings import parse_settings
from meshift.services.launcher.nats_server import NatsServer

BURST = 500
"""Messages under way at once: far below every queue's bound."""

DEADLINE_S = 60.0

OWNER = Owner("worker-1", 1)
ASK = ReplayRequest(request_id="r", attempt=1, hop=0, owner=OWNER, start=0)
REPLY = ReplayReply(owner=OWNER, state=ReplayState.RUNNING, tokens=pack_tokens(range(16)))


class BusSettings(BenchmarkSettings):
    """Publish token batches and ask for replays, over the typed bus and over bare nats-py."""

    rounds: int = Field(31, ge=1, description="interleaved rounds of each (--quick: 9)")
    messages: int = Field(4_000, ge=BURST, description="messages published in a round")
    requests: int = Field(300, ge=1, description="round trips in a round, one after another")
    rows: int = Field(16, ge=1, description="requests in each token batch")


@dataclass(frozen=True)
class Way:
    """One way to talk."""

    publish: Callable[[int], Awaitable[None]]
    """So many messages, until all have been handled."""
    ask: Callable[[], Awaitable[None]]
    """One round trip."""


@dataclass
class Sample:
    """One round of one way."""

    way: str
    round: int
    messages_per_s: float
    messages_per_cpu_s: float
    """Of both ends together: what else the machine does counts less."""
    round_trips_s: list[float]


def main(arguments: Sequence[str]) -> int:
    """Run it."""
    settings = parse_settings(BusSettings, "meshift bench bus", arguments)
    with tempfile.TemporaryDirectory() as folder:
        samples = asyncio.run(_run(settings, Path(folder)))
    result = summary(samples)
    print_table([(key, str(value)) for key, value in result.items()])
    write_result(settings.json_path, result, [vars(sample) for sample in samples])
    return 0


async def _run(settings: BusSettings, folder: Path) -> list[Sample]:
    batch = token_batch(settings.rows)
    samples = []
    async with NatsServer(folder) as server:
        typed_sender, typed_receiver = await typed_bus(server.url, "sender"), await typed_bus(server.url, "receiver")
        bare_sender, bare_receiver = await nats.connect(server.url), await nats.connect(server.url)
        ways = {
            "typed": await typed(typed_sender, typed_receiver, batch),
            "bare": await bare(bare_sender, bare_receiver, encode(batch)),
        }
        for way in ways.values():
            await way.publish(BURST)
        for number in range(9 if settings.quick else settings.rounds):
            # Which goes first changes, so that neither gains by it.
            for name in sorted(ways, reverse=bool(number % 2)):
                samples.append(await measure(name, number, ways[name], settings))
        for bus in (typed_sender, typed_receiver):
            await bus.close()
        for client in (bare_sender, bare_receiver):
            await client.close()
    return samples


async def measure(name: str, number: int, way: Way, settings: BusSettings) -> Sample:
    """One round."""
    async with asyncio.timeout(DEADLINE_S):
        begin_s, cpu_s = time.perf_counter(), time.process_time()
        await way.publish(settings.messages)
        rate = settings.messages / (time.perf_counter() - begin_s)
        cpu_rate = settings.messages / (time.process_time() - cpu_s)
        trips = []
        for _ in range(settings.requests):
            begin_s = time.perf_counter()
            await way.ask()
            trips.append(time.perf_counter() - begin_s)
    return Sample(name, number, rate, cpu_rate, trips)


async def typed_bus(url: str, name: str) -> NatsBus:
    """A client that has joined, without tracing: bare nats-py has none either."""
    bus = NatsBus(NatsSettings(servers=(url,), client_name=name))
    await bus.start(ServiceInfo("benchmark", name))
    return bus


async def typed(sender: Bus, receiver: Bus, batch: TokenBatch) -> Way:
    """Models out, validated models in."""
    handled = Tally()

    def answer(_: ReplayRequest) -> ReplayReply:
        return REPLY

    receiver.subscribe("benchmark.typed.tokens", TokenBatch, lambda _: handled.one())
    receiver.serve("ask", "benchmark.typed.ask", ReplayRequest, answer)
    await receiver.flush(timeout_s=DEADLINE_S)

    async def publish(count: int) -> None:
        for burst in bursts(count):
            handled.expect(burst)
            for _ in range(burst):
                sender.publish("benchmark.typed.tokens", batch)
            await handled.all.wait()

    async def request() -> None:
        await sender.request("benchmark.typed.ask", ASK, ReplayReply, timeout_s=DEADLINE_S)

    return Way(publish, request)


async def bare(sender: Client, receiver: Client, payload: bytes) -> Way:
    """Bytes of the same sizes, made beforehand and not looked at."""
    handled = Tally()
    ask, reply = encode(ASK), encode(REPLY)

    async def on_message(_: Msg) -> None:
        handled.one()

    async def on_request(message: Msg) -> None:
        await message.respond(reply)

    await receiver.subscribe("benchmark.bare.tokens", cb=on_message)
    await receiver.subscribe("benchmark.bare.ask", cb=on_request)
    await receiver.flush()

    async def publish(count: int) -> None:
        for burst in bursts(count):
            handled.expect(burst)
            for _ in range(burst):
                await sender.publish("benchmark.bare.tokens", payload)
            await handled.all.wait()

    async def request() -> None:
        await sender.request("benchmark.bare.ask", ask, timeout=DEADLINE_S)

    return Way(publish, request)


class Tally:
    """Counts down to an event."""

    def __init__(self) -> None:
        self.all = asyncio.Event()
        self._left = 0

    def expect(self, count: int) -> None:
        """So many are to come."""
        self._left = count
        self.all.clear()

    def one(self) -> None:
        """One has come."""
        self._left -= 1
        if not self._left:
            self.all.set()


def bursts(count: int) -> list[int]:
    """`count` in pieces of at most `BURST`."""
    whole, rest = divmod(count, BURST)
    return [BURST] * whole + ([rest] if rest else [])


def token_batch(rows: int) -> TokenBatch:
    """What a worker sends each step: one token of each request."""
    return TokenBatch(
        owner=OWNER,
        emitted_ns=1,
        request_ids=tuple(f"chatcmpl-{number:032x}" for number in range(rows)),
        attempts=(1,) * rows,
        hops=(0,) * rows,
        starts=tuple(range(100, 100 + rows)),
        counts=(1,) * rows,
        tokens=pack_tokens(range(rows)),
    )


def summary(samples: list[Sample]) -> dict[str, Any]:
    """Medians over the rounds; ratios are of the rounds, pair by pair (typed to bare)."""
    by_way = {way: [sample for sample in samples if sample.way == way] for way in ("typed", "bare")}
    pairs = list(zip(by_way["typed"], by_way["bare"], strict=True))
    ratios = [typed.messages_per_s / bare.messages_per_s for typed, bare in pairs]
    result: dict[str, Any] = {"rounds": len(pairs)}
    for way, own in by_way.items():
        trips = [trip for sample in own for trip in sample.round_trips_s]
        result[f"{way}_messages_per_s"] = round(statistics.median(sample.messages_per_s for sample in own))
        result[f"{way}_round_trip_ms_p50"] = round(1e3 * percentile(trips, 0.5), 3)
        result[f"{way}_round_trip_ms_p99"] = round(1e3 * percentile(trips, 0.99), 3)
    cpu_ratios = [typed.messages_per_cpu_s / bare.messages_per_cpu_s for typed, bare in pairs]
    result["messages_ratio"] = round(statistics.median(ratios), 3)
    result["messages_ratio_spread"] = [round(min(ratios), 3), round(max(ratios), 3)]
    result["messages_per_cpu_ratio"] = round(statistics.median(cpu_ratios), 3)
    for share, name in ((0.5, "p50"), (0.99, "p99")):
        trips_ratio = [percentile(t.round_trips_s, share) / percentile(b.round_trips_s, share) for t, b in pairs]
        result[f"round_trip_{name}_ratio"] = round(statistics.median(trips_ratio), 3)
    return result
