"""Attention on a CPU: our kernel against SGLang's `torch_native`, by itself and in whole engines, and over units of
stacked layers against plain buffers.

    table_over_contiguous   our kernel, decode steps: its time on a table of units' addresses (pages of 16 tokens, four
                            layers a unit, in random order) over that on plain buffers, in order; median of the rounds'
                            ratios, the worse of both contexts
    decode_speedup          torch_native's median time over our kernel's on units: a step of 8 sequences of so many
                            tokens
    extend_speedup          the same for a prefill of 512 tokens without a prefix, which suits us least: torch_native
                            computes the prefix again
    engine_decode_speedup   CPU time of the rank process for a decode step of 8 requests of so many tokens: an engine
                            with `--attention-backend torch_native` over one with ours, all else the same

One thread computes. All are compared in turns, and times are CPU times: others may be at work on the machine. All must
give the same, to rounding, and the same tokens in the engines, or the exit status is 1."""

import asyncio
import random
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from meshift.benchmarks import attention_kernels
from meshift.benchmarks.attention_engines import BACKENDS, EngineSamples, sample_engines
from meshift.benchmarks.attention_kernels import Case
from meshift.benchmarks.report import BenchmarkSettings, print_table, write_result
from meshift.benchmarks.svg import Chart, document
from meshift.services.cli.model import SMALL_MODEL, resolve_model
from meshift.services.cli.settings import parse_settings

BATCH = 8
DECODES = (Case("512", BATCH, 512), Case("2048", BATCH, 2048))
EXTENDS = (Case("extend", 1, 512, 512), Case("extend after as many", 1, 1024, 512))
ENGINE_CONTEXTS = (256, 1024)

AIMS = {"table_over_contiguous": 1.02, "decode_speedup": 3.5, "extend_speedup": 1.0}
ENGINE_AIMS = {256: 1.3, 1024: 1.8}


class AttentionSettings(BenchmarkSettings):
    """Decode steps and prefills with SGLang's own attention and with ours: kernels, and whole engines."""

    model: str = Field(SMALL_MODEL, description="of the engines: a prepared model's name, or a Hugging Face folder")
    rounds: int = Field(31, ge=1, description="samples of each kernel (--quick: 11)")
    steps: int = Field(24, ge=2, description="decode steps of an engine's sample (--quick: 12)")
    repeats: int = Field(5, ge=1, description="samples of each engine and context (--quick: 3)")
    kernels_only: bool = Field(False, description="start no engine")
    engines_only: bool = Field(False, description="no kernel by itself")
    timeout_s: float = Field(240.0, gt=0, description="of one engine's sample")
    seed: int = Field(0, description="of prompts and of where pages lie")


def main(arguments: Sequence[str]) -> int:
    """Run it."""
    settings = parse_settings(AttentionSettings, "meshift bench attention", list(arguments))
    dice = random.Random(settings.seed)
    rounds = min(settings.rounds, 11) if settings.quick else settings.rounds
    samples: list[dict[str, Any]] = []
    identical = True
    if not settings.engines_only:
        samples = [sample for case in (*DECODES, *EXTENDS) for sample in attention_kernels.measure(case, rounds, dice)]
        print_table(table(summary(samples), samples))
    if not settings.kernels_only:
        engines = asyncio.run(_engines(settings, dice))
        samples, identical = [*samples, *engines.samples], engines.identical
        print_table(engine_table(samples))
    result = summary(samples)
    if not identical:
        print("the engines gave different tokens")
    write_result(settings.json_path, result, samples)
    if settings.json_path is not None:
        settings.json_path.with_name(settings.json_path.name + ".svg").write_text(document(charts(samples)))
    return 0 if identical else 1


async def _engines(settings: AttentionSettings, dice: random.Random) -> EngineSamples:
    with tempfile.TemporaryDirectory() as folder:
        return await sample_engines(
            resolve_model(settings.model),
            Path(folder),
            contexts=ENGINE_CONTEXTS,
            batch=BATCH,
            steps=min(settings.steps, 12) if settings.quick else settings.steps,
            repeats=min(settings.repeats, 3) if settings.quick else settings.repeats,
            timeout_s=settings.timeout_s,
            dice=dice,
        )


def summary(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the module's docstring, as far as there are samples."""
    result: dict[str, Any] = {}
    if any("case" in sample for sample in samples):
        result |= {
            "table_over_contiguous": round(max(_paired(samples, case.name) for case in DECODES), 3),
            "decode_speedup": {case.name: round(_speedup(samples, case.name), 2) for case in DECODES},
            "extend_speedup": round(_speedup(samples, EXTENDS[0].name), 2),
        }
    contexts = sorted({sample["context"] for sample in samples if "context" in sample})
    if contexts:
        result["engine_decode_speedup"] = {
            str(context): round(_step_ms(samples, context, BACKENDS[0]) / _step_ms(samples, context, BACKENDS[1]), 2)
            for context in contexts
        }
    return result


def table(result: dict[str, Any], samples: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """For people: each figure with its aim, and the times behind it."""
    ratio = result["table_over_contiguous"]
    rows = [("table over contiguous", f"{ratio} (aim: at most {AIMS['table_over_contiguous']})")]
    for case in (*DECODES, *EXTENDS):
        name = "decode" if case.queries == 1 else "extend"
        times = ", ".join(f"{who} {_ms(samples, case.name, who):.2f} ms" for who in attention_kernels.SUBJECTS)
        aim = AIMS[f"{name}_speedup"]
        what = f"decode, {case.tokens} tokens x {case.batch}" if case.queries == 1 else case.name
        rows.append((what, f"{_speedup(samples, case.name):.2f} x (aim: {aim}): {times}"))
    return rows


def engine_table(samples: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """The same of engines."""
    rows = []
    for context, speedup in summary(samples)["engine_decode_speedup"].items():
        times = ", ".join(f"{who} {_step_ms(samples, int(context), who):.1f} ms" for who in BACKENDS)
        rows.append((f"engine, {context} tokens x {BATCH}", f"{speedup} x (aim: {ENGINE_AIMS[int(context)]}): {times}"))
    return rows


def charts(samples: Sequence[dict[str, Any]]) -> list[Chart]:
    """CPU time of a decode step, by context: kernels, then engines."""
    found = []
    if any("case" in sample for sample in samples):
        kernels = {who: [_ms(samples, case.name, who) for case in DECODES] for who in attention_kernels.SUBJECTS}
        title = f"attention of {attention_kernels.LAYERS} layers"
        found.append(Chart(title, "tokens", "CPU ms", [case.name for case in DECODES], kernels))
    contexts = sorted({sample["context"] for sample in samples if "context" in sample})
    if contexts:
        steps = {who: [_step_ms(samples, context, who) for context in contexts] for who in BACKENDS}
        found.append(Chart("decode step of an engine", "tokens", "CPU ms", [str(one) for one in contexts], steps))
    return found


def _ms(samples: Sequence[dict[str, Any]], case: str, subject: str) -> float:
    wanted = (case, subject)
    return float(statistics.median(one["ms"] for one in samples if (one.get("case"), one.get("subject")) == wanted))


def _speedup(samples: Sequence[dict[str, Any]], case: str) -> float:
    return _ms(samples, case, "torch_native") / _ms(samples, case, "table")


def _paired(samples: Sequence[dict[str, Any]], case: str) -> float:
    rounds: dict[int, Counter[str]] = {}
    for sample in samples:
        if sample.get("case") == case:
            rounds.setdefault(sample["round"], Counter())[sample["subject"]] += sample["ms"]
    return statistics.median(times["table"] / times["contiguous"] for times in rounds.values())


def _step_ms(samples: Sequence[dict[str, Any]], context: int, backend: str) -> float:
    wanted = (context, backend)
    return float(
        statistics.median(one["step_ms"] for one in samples if (one.get("context"), one.get("backend")) == wanted)
    )
