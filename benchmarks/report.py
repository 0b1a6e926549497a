"""What all benchmarks do alike: options, a table, the JSON that was asked for, the raw samples beside it."""

import json
import platform
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


def write_result(path: Path | None, result: dict[str, Any], samples: dict[str, Any]) -> None:
    """`FILE.json` gets the result, `FILE.samples.json` the samples and the machine."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    machine = {"python": platform.python_version(), "machine": platform.machine()}
    path.with_suffix(".samples.json").write_text(json.dumps({"machine": machine, **samples}) + "\n")


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
