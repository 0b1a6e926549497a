"""Request traces from files, in the formats in which they are published.

| format | known by |
|---|---|
| plain | CSV with `arrival_s,input_tokens,output_tokens` |
| Azure | CSV with `TIMESTAMP,ContextTokens,GeneratedTokens` |
| BurstGPT | CSV with `Timestamp`, `Request tokens` and `Response tokens` |
| Mooncake | JSON lines with `timestamp` (ms), `input_length`, `output_length` |
| ShareGPT | a JSON list of conversations: no times, and text instead of lengths |

Each may be compressed (`.gz`). Rows without input or output tokens (failures in BurstGPT) are left out.
"""

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

CHARACTERS_A_TOKEN = 4
"""English text; for ShareGPT, whose conversations are text."""


class TraceError(ValueError):
    """The file is no trace that is known; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request. Without times, `arrival_s` is None in every row."""

    arrival_s: float | None
    input_tokens: int
    output_tokens: int


def load_trace(path: Path) -> list[TraceRow]:
    """All rows, arrivals from 0 on. Raises TraceError, OSError."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        rows = [row for row in _parse(text, path) if row.input_tokens > 0 and row.output_tokens > 0]
    except (ValueError, KeyError, TypeError, EOFError, gzip.BadGzipFile) as error:
        raise TraceError(f"{path.name}: {error}") from error
    if not rows:
        raise TraceError(f"{path.name}: no requests")
    return _from_zero(rows)


def _parse(text: str, path: Path) -> Iterable[TraceRow]:
    start = text.lstrip()[:1]
    if start == "[":
        return _share_gpt(json.loads(text))
    if start == "{":
        return _mooncake([json.loads(line) for line in text.splitlines() if line.strip()])
    reader = csv.DictReader(io.StringIO(text))
    columns = set(reader.fieldnames or ())
    for needed, parse in _CSV.items():
        if columns.issuperset(needed):
            return map(parse, reader)
    raise TraceError(f"columns {sorted(columns)} are of no format that is known")


def _plain(row: Mapping[str, str]) -> TraceRow:
    return TraceRow(float(row["arrival_s"]), int(row["input_tokens"]), int(row["output_tokens"]))


def _azure(row: Mapping[str, str]) -> TraceRow:
    # Seven digits of a second; `fromisoformat` takes six.
    stamp = row["TIMESTAMP"].strip()
    whole, _, fraction = stamp.partition(".")
    seconds = datetime.fromisoformat(whole).timestamp() + float(f"0.{fraction.split('+')[0] or 0}")
    return TraceRow(seconds, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _burst_gpt(row: Mapping[str, str]) -> TraceRow:
    return TraceRow(float(row["Timestamp"]), int(row["Request tokens"]), int(row["Response tokens"]))


_CSV: Mapping[tuple[str, ...], Callable[[Mapping[str, str]], TraceRow]] = {
    ("arrival_s", "input_tokens", "output_tokens"): _plain,
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _azure,
    ("Timestamp", "Request tokens", "Response tokens"): _burst_gpt,
}


def _mooncake(records: Sequence[Mapping[str, Any]]) -> Iterator[TraceRow]:
    """Arrivals were logged in steps of seconds: those of one step are spread evenly up to the next."""
    ordered = sorted(records, key=lambda record: float(record["timestamp"]))
    steps = [
        (time_ms / 1000, list(group)) for time_ms, group in groupby(ordered, lambda item: float(item["timestamp"]))
    ]
    for index, (time_s, group) in enumerate(steps):
        gap_s = steps[index + 1][0] - time_s if index + 1 < len(steps) else 0.0
        for place, record in enumerate(group):
            arrival_s = time_s + gap_s * place / len(group)
            yield TraceRow(arrival_s, int(record["input_length"]), int(record["output_length"]))


def _share_gpt(conversations: Sequence[Mapping[str, Any]]) -> Iterator[TraceRow]:
    """One request a turn of the assistant; its input is the whole conversation before."""
    for conversation in conversations:
        before = 0
        for message in conversation["conversations"]:
            tokens = -(-len(message["value"]) // CHARACTERS_A_TOKEN)
            if message["from"] in ("gpt", "assistant", "chatgpt") and before:
                yield TraceRow(None, before, tokens)
            before += tokens


def _from_zero(rows: list[TraceRow]) -> list[TraceRow]:
    timed = [(row.arrival_s, row) for row in rows if row.arrival_s is not None]
    if not timed:
        return rows
    timed.sort(key=lambda entry: entry[0])
    first_s = timed[0][0]
    return [TraceRow(arrival_s - first_s, row.input_tokens, row.output_tokens) for arrival_s, row in timed]
