"""kill -9 of a worker under greedy streams, and of the scheduler: what clients see. Real engine, real processes."""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from pydantic import Field

from meshift.benchmarks.mesh_process import MeshProcess, running_mesh
from meshift.benchmarks.report import BenchmarkSettings, percentile, print_table, write_result
from meshift.benchmarks.rest import StreamedChat, stream_chat
from meshift.schemas.requests import Submit
from meshift.schemas.subjects import worker_submit
from meshift.services.cli.client import joined_bus
from meshift.services.cli.settings import parse_settings

KILLED, SURVIVOR = "worker-1", "worker-2"
ROUND_DEADLINE_S = 300.0

TOPICS = ("the sea", "a lighthouse", "bread", "the moon", "a long road", "winter", "an old clock", "a small dog")


class FailoverSettings(BenchmarkSettings):
    """Kill a worker under eight greedy streams, then the scheduler."""

    model: str = Field("smollm2", description="a prepared model's name, or a folder")
    engine: str = Field("sglang", description="sglang or sim")
    rounds: int = Field(3, ge=1, description="kills of a worker (--quick: one)")
    streams: int = Field(8, ge=1, le=len(TOPICS), description="streams at each kill")
    output_tokens: int = Field(80, ge=8, description="length of each")


@dataclass
class Round:
    """One kill."""

    detection_ms: list[float] = field(default_factory=list)
    """From the kill to the new submission of each stream that had lost its worker."""
    pause_ms: list[float] = field(default_factory=list)
    """The longest silence of each of those streams, as its client saw it."""
    lost: int = 0
    altered: int = 0


def main(arguments: Sequence[str]) -> int:
    """Run it."""
    settings = parse_settings(FailoverSettings, "meshift bench failover", arguments)
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_run(settings, Path(folder)))


async def _run(settings: FailoverSettings, folder: Path) -> int:
    up = ("--workers", "2", "--engine", settings.engine, "--model", settings.model)
    async with (
        running_mesh(folder, *up) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=ROUND_DEADLINE_S) as rest,
    ):
        name = settings.model.rstrip("/").rsplit("/", 1)[-1]
        chats = [chat_of(name, topic, settings.output_tokens) for topic in TOPICS[: settings.streams]]
        print(f"{len(chats)} undisturbed streams...", flush=True)
        reference = [await asyncio.wait_for(stream_chat(rest, chat), ROUND_DEADLINE_S) for chat in chats]
        rounds = []
        for number in range(1 if settings.quick else settings.rounds):
            print(f"round {number + 1}: kill -9 of {KILLED} under {len(chats)} streams...", flush=True)
            rounds.append(await worker_round(mesh, rest, chats, reference))
            await mesh.until_printed(f"{KILLED}: ready", 180.0)
        print("kill -9 of the scheduler...", flush=True)
        scheduler = await scheduler_round(mesh, rest, chats[0])
    result = summary(rounds, scheduler)
    print_table([(key, str(value)) for key, value in result.items()])
    samples = [{"killed": KILLED, **vars(item)} for item in rounds]
    write_result(settings.json_path, result, [*samples, {"killed": "scheduler", **scheduler}])
    return 0 if not (result["requests_lost"] or result["requests_altered"]) else 1


def chat_of(model: str, topic: str, tokens: int) -> dict[str, Any]:
    """A greedy chat of exactly `tokens` tokens."""
    message = {"role": "user", "content": f"Tell me a story about {topic}."}
    return {"model": model, "messages": [message], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


async def worker_round(
    mesh: MeshProcess, rest: httpx.AsyncClient, chats: list[dict[str, Any]], reference: list[StreamedChat]
) -> Round:
    """Kill one of two workers when every stream has given some text."""
    result = Round()
    resubmitted: list[float] = []
    mesh.printed[:] = [line for line in mesh.printed if f"{KILLED}: ready" not in line]

    def note(submit: Submit) -> None:
        if submit.attempt > 1:
            resubmitted.append(time.monotonic())

    async with joined_bus(mesh.state().nats_url) as bus:
        bus.subscribe(
            worker_submit(SURVIVOR), Submit, lambda m: resubmitted.append(time.monotonic()) if m.attempt > 1 else None
        )
        streams = [StreamedChat() for _ in chats]
        tasks = [
            asyncio.create_task(stream_chat(rest, chat, into=stream))
            for chat, stream in zip(chats, streams, strict=True)
        ]
        async with asyncio.timeout(ROUND_DEADLINE_S):
            while not all(len(stream.times_s) >= 3 for stream in streams):
                await asyncio.sleep(0.01)
            mesh.kill(KILLED)
            killed_s = time.monotonic()
            await asyncio.gather(*tasks, return_exceptions=True)
    result.detection_ms = [1e3 * (at_s - killed_s) for at_s in resubmitted]
    pauses = sorted((stream.pause_s_max(after_s=killed_s) for stream in streams), reverse=True)
    result.pause_ms = [1e3 * pause_s for pause_s in pauses[: len(resubmitted)]]
    for stream, expected in zip(streams, reference, strict=True):
        result.lost += stream.finish_reason is None
        result.altered += stream.finish_reason is not None and stream.text != expected.text
    return result


async def scheduler_round(mesh: MeshProcess, rest: httpx.AsyncClient, chat: dict[str, Any]) -> dict[str, Any]:
    """Kill the scheduler, and at once ask for something short; then wait until the frontend has it back."""
    short = {**chat, "max_tokens": 4}
    before = await stream_chat(rest, short)
    mesh.kill("scheduler")
    killed_s = time.monotonic()
    without = [await stream_chat(rest, short) for _ in range(4)]
    async with asyncio.timeout(60.0):
        while (await rest.get("/ready")).json()["scheduler"] != "ok":
            await asyncio.sleep(0.05)
    return {
        "first_text_ms_before": 1e3 * before.first_text_s,
        "first_text_ms_without": [1e3 * stream.first_text_s for stream in without],
        "served_without": sum(stream.finish_reason is not None for stream in without),
        "back_to_normal_s": time.monotonic() - killed_s,
    }


def summary(rounds: list[Round], scheduler: dict[str, Any]) -> dict[str, Any]:
    """The figures."""
    detections = [value for item in rounds for value in item.detection_ms]
    pauses = [value for item in rounds for value in item.pause_ms]
    return {
        "kills": len(rounds),
        "streams_resumed": len(detections),
        "detection_ms_p50": round(percentile(detections, 0.5), 1),
        "detection_ms_max": round(max(detections), 1),
        "pause_ms_p50": round(percentile(pauses, 0.5), 1),
        "pause_ms_max": round(max(pauses), 1),
        "requests_lost": sum(item.lost for item in rounds),
        "requests_altered": sum(item.altered for item in rounds),
        "served_without_scheduler": scheduler["served_without"],
        "back_to_normal_s": round(scheduler["back_to_normal_s"], 2),
    }
