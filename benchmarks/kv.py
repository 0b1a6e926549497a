"""KV memory in units: how much of them tokens fill, how fast pages are picked to be given up, how much really goes.

Utilisation: the requests of PatternShift (PipeLive, section 7.1) live in a block table, a token a step; bytes of tokens
over bytes of the units that hold them, both summed over time. Beside it the closed form, from the lengths alone.

Resizing: the memory of a small chat model under load, halved and doubled; what goes is counted by the kernel.
Times are the thread's CPU time: others may be at work on the machine."""

import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import Field

from meshift.benchmarks.report import BenchmarkSettings, print_table, write_result
from meshift.kv_memory.arena import CpuArena
from meshift.kv_memory.block_table import BlockTable, PageState
from meshift.kv_memory.stacking import DEFAULT_LAYERS_PER_GROUP, Stacking, default_unit_bytes, expected_utilisation
from meshift.services.cli.settings import parse_settings

STACKINGS = (1, 2, 4, 8)
PHASES = ((100, 512, 16), (100, 128, 512))
"""PatternShift: requests, prompt and output tokens of each phase."""

COMPACTION_PAGES = 100_000
QUICK_REPEATS = 11


class KvSettings(BenchmarkSettings):
    """Fill units with the tokens of PatternShift; compact, halve and double an arena under load."""

    unit_tokens: int = Field(512, ge=8, description="tokens of one layer that fill a unit (the paper's C)")
    arrivals_per_step: float = Field(0.2, gt=0, description="requests that come in a step, on average")
    repeats: int = Field(51, ge=1, description="compactions and resizes (--quick: 11)")
    arena_tokens: int = Field(4096, ge=64, description="capacity of the arena that is halved")
    seed: int = Field(0, description="of arrivals and of what is used")


@dataclass
class Life:
    """A request in the table."""

    tokens: int
    end: int
    pages: list[int]


def main(arguments: Sequence[str]) -> int:
    """Run it."""
    settings = parse_settings(KvSettings, "meshift bench kv", arguments)
    repeats = min(settings.repeats, QUICK_REPEATS) if settings.quick else settings.repeats
    dice = random.Random(settings.seed)
    closed = {k: float(expected_utilisation(k, settings.unit_tokens, _held_lengths())) for k in STACKINGS}
    samples: list[dict[str, Any]] = [_fill(k, settings, random.Random(settings.seed)) for k in STACKINGS]
    compactions = [_compact_ms(dice) for _ in range(repeats)]
    resizes = _resize(settings.arena_tokens, repeats, dice)
    result = {
        "utilisation": {str(sample["k"]): round(sample["utilisation"], 4) for sample in samples},
        "closed_form": {str(k): round(value, 4) for k, value in closed.items()},
        "compact_ms_p50": round(statistics.median(compactions), 4),
        "released_fraction": round(min(sample["released_fraction"] for sample in resizes), 4),
        "resize_ms_p50": round(statistics.median(sample["ms"] for sample in resizes), 4),
    }
    print_table([(name, str(value)) for name, value in result.items()])
    write_result(settings.json_path, result, [*samples, *({"compact_ms": ms} for ms in compactions), *resizes])
    return 0


# ---- utilisation


def _held_lengths() -> dict[int, int]:
    """Of all steps of all requests: how many tokens are held, how often."""
    held: Counter[int] = Counter()
    for requests, prompt, output in PHASES:
        for tokens in range(prompt, prompt + output + 1):
            held[tokens] += requests
    return dict(held)


def _arrivals(per_step: float, dice: random.Random) -> Iterator[tuple[float, int, int]]:
    """Time in steps, prompt, output: a Poisson process through both phases."""
    now = 0.0
    for requests, prompt, output in PHASES:
        for _ in range(requests):
            now += dice.expovariate(per_step)
            yield now, prompt, output


def _fill(k: int, settings: KvSettings, dice: random.Random) -> dict[str, Any]:
    """Let all requests live in a table of pages of C / k tokens, one token a step."""
    page_tokens = settings.unit_tokens // k
    waiting = list(_arrivals(settings.arrivals_per_step, dice))
    longest = max(prompt + output for _, prompt, output in PHASES)
    pages_max = len(waiting) * -(-longest // page_tokens)
    table, living = BlockTable(pages_max, pages_max), list[Life]()
    token_steps = page_steps = step = 0
    shares: list[float] = []
    while waiting or living:
        while waiting and waiting[0][0] <= step:
            _, prompt, output = waiting.pop(0)
            living.append(Life(prompt, prompt + output, []))
        for life in living:
            missing = -(-life.tokens // page_tokens) - len(life.pages)
            life.pages += table.allocate(missing).tolist() if missing > 0 else []
        tokens, used = sum(life.tokens for life in living), table.counts.used
        token_steps, page_steps = token_steps + tokens, page_steps + used
        shares += [tokens / (used * page_tokens)] if used else []
        living = [life for life in living if _goes_on(life, table)]
        step += 1
    utilisation = token_steps / (page_steps * page_tokens)
    return {"k": k, "utilisation": utilisation, "mean_of_steps": statistics.fmean(shares), "steps": step}


def _goes_on(life: Life, table: BlockTable) -> bool:
    life.tokens += 1
    if life.tokens <= life.end:
        return True
    table.free(life.pages)
    return False


# ---- compaction and resizing


def _compact_ms(dice: random.Random) -> float:
    """To pick half of the free pages of a table of 100,000, of which a random part is used."""
    table = BlockTable(COMPACTION_PAGES, COMPACTION_PAGES)
    order = np.random.default_rng(dice.getrandbits(32)).permutation(table.allocate(COMPACTION_PAGES))
    table.free(order[: int(COMPACTION_PAGES * dice.uniform(0.3, 0.9))])
    start = time.thread_time()
    table.compact(table.counts.free // 2)
    return (time.thread_time() - start) * 1e3


def _resize(tokens: int, repeats: int, dice: random.Random) -> list[dict[str, Any]]:
    """Halve and double a chat model's memory, of which requests use 40% and cached prefixes hold 30%."""
    sizes = {"heads": 3, "head_dim": 64, "element_bytes": 4}
    stacking = Stacking(layers=30, **sizes, unit_bytes=default_unit_bytes(**sizes))
    pages = tokens // stacking.page_tokens
    arenas = [CpuArena(pages, stacking.unit_bytes) for _ in range(stacking.groups)]
    samples = []
    for arena in arenas:
        arena.commit(range(pages))
    for _ in range(repeats):
        table = _loaded_table(pages, dice)
        for arena in arenas:
            arena.bytes.fill_(1)
        samples.append(_halve_and_double(table, arenas, stacking))
    for arena in arenas:
        arena.close()
    assert stacking.layers_per_group == DEFAULT_LAYERS_PER_GROUP
    return samples


def _loaded_table(pages: int, dice: random.Random) -> BlockTable:
    table = BlockTable(pages, pages)
    order = table.allocate(pages).tolist()
    dice.shuffle(order)
    used, cached = int(pages * 0.4), int(pages * 0.3)
    table.cache(order[used : used + cached])
    table.free(order[used + cached :])
    return table


def _halve_and_double(table: BlockTable, arenas: Sequence[CpuArena], stacking: Stacking) -> dict[str, Any]:
    count = table.counts.capacity // 2
    before = sum(arena.resident_bytes() for arena in arenas)
    start = time.thread_time()
    missing = max(0, count - table.counts.free)
    table.evict(table.in_state(PageState.CACHED)[:missing])
    gone = table.shrink(count)
    for arena in arenas:
        arena.release(gone)
    shrink_s = time.thread_time() - start
    released = before - sum(arena.resident_bytes() for arena in arenas)
    start = time.thread_time()
    for arena in arenas:
        arena.commit(table.grow(count) if arena is arenas[0] else gone)
    grow_s = time.thread_time() - start
    wanted = len(gone) * len(arenas) * stacking.unit_bytes
    return {"released_fraction": released / wanted, "ms": (shrink_s + grow_s) * 1e3, "shrink_ms": shrink_s * 1e3}
