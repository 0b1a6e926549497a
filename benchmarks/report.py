"""What all benchmarks do alike: options, a table, the JSON that was asked for, the raw samples beside it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field


class BenchmarkSettings(BaseModel):
    """Options of every benchmark."""

    json_path: Path | None = Field(None, alias="json", description="write the result here, raw samples beside it")
    quick: bool = Field(False, description="fewer repetitions: under five minutes")


def print_table(rows: Sequence[tuple[str, str]]) -> None:
    """Names and values, aligned."""
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name.ljust(width)}  {value}")


def write_result(path: Path | None, result: dict[str, Any], samples: Sequence[dict[str, Any]]) -> None:
    """`FILE` gets the result, `FILE.raw.jsonl` the samples, one a line, from which it can be computed again."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    raw = path.with_name(path.name + ".raw.jsonl")
    raw.write_text("".join(json.dumps(sample) + "\n" for sample in samples))


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
