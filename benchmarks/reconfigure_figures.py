"""What the samples of the reconfigure benchmark come to. Pure.

Samples, one a line of `FILE.raw.jsonl`, by their `measure`:

    circumstances   settings, KV that lives, the machine
    stream          times of one stream's tokens (ms since the benchmark began), in one run
    change          one change: when it began, was committed, had ended; the stops of its stages
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from meshift.benchmarks.report import percentile
from meshift.benchmarks.svg import Chart, document

Sample = dict[str, Any]

UNDISTURBED = "undisturbed"
FULL, NO_PATCH, NO_ASYNC, RESTART = "full", "no-patch", "no-patch-no-async", "restart"
MODES = (FULL, NO_PATCH, NO_ASYNC, RESTART)
TAIL_MS = 250.0
"""After the end of a change: what it has done to the streams shows with the next tokens."""

FIRST_GAPS = 4
"""Of each stream, left out: others are still being prefilled."""

LAG_STOP_MS_MAX = 1.5
NO_PATCH_OVER_FULL_MIN = 20.0


@dataclass(frozen=True)
class Gap:
    """Between two tokens of one stream, in ms."""

    run: int
    start: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.start


def of_measure(samples: Sequence[Sample], measure: str) -> list[Sample]:
    """Those of one kind."""
    return [sample for sample in samples if sample["measure"] == measure]


def gaps(samples: Sequence[Sample], kind: str | None = None) -> Iterator[Gap]:
    """Of all streams, or of one kind of runs."""
    for stream in of_measure(samples, "stream"):
        if kind is None or stream["kind"] == kind:
            times = stream["times_ms"][FIRST_GAPS:]
            yield from (Gap(stream["run"], start, end) for start, end in pairwise(times))


def normal_gaps(samples: Sequence[Sample]) -> list[float]:
    """Without any change."""
    return [gap.length for gap in gaps(samples, UNDISTURBED)]


def stop_ms(change: Sample) -> float:
    """The longest time in which a stage could have stepped and was held back, of the stage where that is most."""
    return float(max(change["stop_ns"])) / 1e6


def gap_ms(change: Sample, samples: Sequence[Sample]) -> float:
    """The longest gap of a stream in the time of a change."""
    begin, end = change["began_ms"], change["ended_ms"] + TAIL_MS
    found = [gap.length for gap in gaps(samples) if gap.run == change["run"] and gap.end > begin and gap.start < end]
    return max(found, default=0.0)


def row_of(changes: Sequence[Sample], samples: Sequence[Sample], normal_ms_p99: float) -> dict[str, Any]:
    """Of changes of one kind."""
    first = changes[0]
    return {
        "mode": first["mode"],
        "commit": first["commit"],
        "layers_moved": first["layers_moved"],
        "stop_ms_p50": round(statistics.median(map(stop_ms, changes)), 3),
        "gap_ms_max": round(max(gap_ms(change, samples) for change in changes), 2),
        "normal_gap_ms_p99": round(normal_ms_p99, 2),
        "total_s": round(statistics.median((one["ended_ms"] - one["began_ms"]) / 1e3 for one in changes), 3),
        "identical": all(stream["identical"] for run in runs_of(changes) for stream in streams_of(samples, run)),
        "stop_ms_max": round(max(map(stop_ms, changes)), 3),
        "last_patch_tokens_max": max(change["last_patch_tokens"] for change in changes),
        "repeats": len(changes),
    }


def runs_of(changes: Sequence[Sample]) -> set[int]:
    """In which they were."""
    return {change["run"] for change in changes}


def streams_of(samples: Sequence[Sample], run: int) -> list[Sample]:
    """Of one run."""
    return [stream for stream in of_measure(samples, "stream") if stream["run"] == run]


def result_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """The JSON that is asked for."""
    circumstances = of_measure(samples, "circumstances")[0]
    normal = normal_gaps(samples)
    normal_ms_p99 = percentile(normal, 0.99)
    kinds: dict[tuple[int, str, int], list[Sample]] = {}
    for change in of_measure(samples, "change"):
        place = MODES.index(change["mode"])
        kinds.setdefault((place, change["commit"], change["layers_moved"]), []).append(change)
    return {
        "decode_step_ms_p50": round(statistics.median(normal), 3),
        "live_kv_mb": round(circumstances["live_kv_bytes"] / 1e6, 1),
        "link_gbps": circumstances["link_gbps"],
        "rows": [row_of(kinds[kind], samples, normal_ms_p99) for kind in sorted(kinds)],
    }


def table(result: dict[str, Any]) -> list[str]:
    """For people."""
    head = ("mode", "commit", "layers", "stop ms p50", "max", "gap ms max", "total s", "last patch", "changes")
    body = [
        (
            row["mode"],
            row["commit"],
            str(row["layers_moved"]),
            f"{row['stop_ms_p50']:.2f}",
            f"{row['stop_ms_max']:.2f}",
            f"{row['gap_ms_max']:.1f}",
            f"{row['total_s']:.2f}",
            str(row["last_patch_tokens_max"]),
            f"{row['repeats']}{'' if row['identical'] else ' ALTERED'}",
        )
        for row in result["rows"]
    ]
    widths = [max(len(row[column]) for row in (head, *body)) for column in range(len(head))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *body)]


def aims(result: dict[str, Any]) -> list[str]:
    """What it is to reach, and whether it did."""
    rows = result["rows"]
    lagging = [row for row in rows if (row["mode"], row["commit"]) == (FULL, "lag")]
    drained = [row for row in rows if (row["mode"], row["commit"]) == (FULL, "drain")]
    unpatched = {row["layers_moved"]: row["stop_ms_p50"] for row in rows if row["mode"] == NO_PATCH}
    found = []
    if lagging:
        worst = max(row["stop_ms_p50"] for row in lagging)
        found.append(_aim("lag, stop at any number of layers, ms", worst, LAG_STOP_MS_MAX))
    if drained:
        worst = max(row["stop_ms_p50"] for row in drained)
        found.append(_aim("drain, stop, ms (the normal p99 gap)", worst, drained[0]["normal_gap_ms_p99"]))
    if unpatched and (lagging or drained):
        layers = max(unpatched)
        best = {row["layers_moved"]: row["stop_ms_p50"] for row in (lagging or drained)}
        ratio = unpatched[layers] / max(best[layers], 1e-3)
        found.append(_aim(f"no-patch over full, {layers} layers", ratio, NO_PATCH_OVER_FULL_MIN, least=True))
    return found


def _aim(what: str, value: float, bound: float, *, least: bool = False) -> str:
    met = value >= bound if least else value <= bound
    return f"{'met   ' if met else 'MISSED'} {what}: {value:.3g} (at {'least' if least else 'most'} {bound:g})"


def chart(result: dict[str, Any]) -> str:
    """Stop and longest gap over the number of layers, as SVG."""
    layers = sorted({row["layers_moved"] for row in result["rows"]})

    def panel(title: str, field: str) -> Chart:
        series: dict[str, list[float | None]] = {}
        for row in result["rows"]:
            name = f"{row['mode']}, {row['commit']}" if row["mode"] == FULL else row["mode"]
            series.setdefault(name, [None] * len(layers))[layers.index(row["layers_moved"])] = row[field]
        return Chart(title, "layers moved", "ms", [str(count) for count in layers], series)

    return document([panel("Stop of a stage", "stop_ms_p50"), panel("Longest gap of a stream", "gap_ms_max")])
