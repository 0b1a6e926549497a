"""The move benchmark's figures for people: tables, aims, a plot."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from meshift.benchmarks.move_figures import MODES, MoveFigure, Sample, decode_step_ms, move_figures, of_measure
from meshift.benchmarks.move_overhead import by_side
from meshift.benchmarks.svg import Chart, document

LIVE_FROZEN_MS_MAX = 30.0
LIVE_GROWTH_MAX = 1.3
GAP_STEPS_MAX = 2.0
BLOCKING_OVER_LIVE_MIN = 20.0
BLOCKING_STEPS_MIN = 20.0
STEPS_RATIO_MAX = 1.05
CPU_RATIO_MAX = 1.01
OTHERS_CORES_MAX = 0.1

Result = dict[str, Any]


def tables(result: Result, samples: Sequence[Sample]) -> str:
    """What was measured."""
    circumstances, figures = of_measure(samples, "circumstances")[0], move_figures(samples)
    head = ("mode", "tokens", "frozen ms p50", "max", "gap ms p50", "in steps", "rounds", "MB", "recomputed", "moves")
    body = [_row(row, figures) for row in result["rows"]]
    sides = [
        (side, *(f"{value:.3f}" for value in ratios), f"{result['co_located']['step_thread_cpu_ratio']:.3f}")
        for side, ratios in by_side(samples).items()
    ]
    lines = [
        "",
        *_aligned([head, *body]),
        "",
        f"decode step {decode_step_ms(samples):.1f} ms; link {result['link_gbps']:g} Gb/s; KV of a token "
        f"{circumstances['token_bytes']} bytes; {circumstances['threads']} thread(s) a worker",
        "",
        *_aligned([("steps beside a move", "median", "mean", "CPU"), *(side[:4] for side in sides)]),
        _frozen_beside(samples),
        f"both: {result['co_located']['steps_ratio_paired']:.3f}, 95% in {result['co_located']['ci95']}",
        "",
        _quiet(circumstances),
    ]
    return "\n".join(lines)


def _frozen_beside(samples: Sequence[Sample]) -> str:
    """Where the destination steps others the request has to wait for the end of a step."""
    moves = [window["figures"] for window in of_measure(samples, "window") if "figures" in window]
    frozen_ms = [figures["frozen_ns"] / 1e6 for figures in moves]
    median = f"{statistics.median(frozen_ms):.1f} ms" if frozen_ms else "unknown"
    return f"freeze to runnable of the moves beside others: median {median}"


def _row(row: dict[str, Any], figures: Iterable[MoveFigure]) -> tuple[str, ...]:
    moves = [figure for figure in figures if (figure.mode, figure.tokens) == (row["mode"], row["tokens"])]
    return (
        row["mode"],
        str(row["tokens"]),
        f"{row['freeze_to_runnable_ms_p50']:.1f}",
        f"{max(move.frozen_ms for move in moves):.1f}",
        f"{row['token_gap_ms_p50']:.1f}",
        f"{statistics.median(move.gap_steps for move in moves):.2f}",
        f"{row['rounds']:g}",
        f"{row['bytes'] / 1e6:.1f}",
        str(row["recomputed_tokens"]),
        f"{row['repeats']}{'' if row['identical'] else ' ALTERED'}",
    )


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]


def _quiet(circumstances: Sample) -> str:
    cores = circumstances["others_cores"]
    text = f"other processes took {cores:.2f} of {circumstances['cores']} cores"
    return text if cores < OTHERS_CORES_MAX else f"{text}: times are not to be trusted"


def aims(result: Result, figures: Sequence[MoveFigure]) -> list[str]:
    """What the mechanism is to reach, and whether it did."""
    rows = {(row["mode"], row["tokens"]): row for row in result["rows"]}
    contexts = sorted({tokens for _, tokens in rows})
    shortest, longest = contexts[0], contexts[-1]
    frozen = {key: row["freeze_to_runnable_ms_p50"] for key, row in rows.items()}
    live = [frozen["live", tokens] for tokens in contexts]
    gaps = [
        statistics.median(move.gap_steps for move in figures if (move.mode, move.tokens) == ("live", tokens))
        for tokens in contexts
    ]
    blocking, others = frozen["blocking", longest], result["co_located"]
    recomputed = max(row["recomputed_tokens"] for row in result["rows"] if row["mode"] != "recompute")
    return [
        _aim("live, freeze to runnable, ms", max(live), LIVE_FROZEN_MS_MAX),
        _aim(f"live, {longest} over {shortest} tokens", live[-1] / live[0], LIVE_GROWTH_MAX),
        _aim("live, token gap in the destination's steps", max(gaps), GAP_STEPS_MAX),
        _aim("live and blocking, tokens computed anew", recomputed, 0),
        _aim(f"blocking over live, {longest} tokens", blocking / live[-1], BLOCKING_OVER_LIVE_MIN, least=True),
        _aim("blocking, in decode steps", blocking / result["decode_step_ms_p50"], BLOCKING_STEPS_MIN, least=True),
        _aim("steps beside a move, ratio", others["steps_ratio_paired"], STEPS_RATIO_MAX),
        _aim("CPU of the step thread beside a move, ratio", others["step_thread_cpu_ratio"], CPU_RATIO_MAX),
    ]


def _aim(what: str, value: float, bound: float, *, least: bool = False) -> str:
    met = value >= bound if least else value <= bound
    return f"{'met   ' if met else 'MISSED'} {what}: {value:.3g} (at {'least' if least else 'most'} {bound:g})"


def chart(result: Result) -> str:
    """Freeze and gap of each mode over the context, as SVG."""
    contexts = sorted({row["tokens"] for row in result["rows"]})

    def panel(title: str, value: Callable[[dict[str, Any]], float]) -> Chart:
        values = {(row["mode"], row["tokens"]): value(row) for row in result["rows"]}
        series = {mode: [values.get((mode, tokens)) for tokens in contexts] for mode in MODES}
        return Chart(title, "tokens of context", "ms", [str(tokens) for tokens in contexts], series)

    return document(
        [
            panel("Freeze to runnable", lambda row: row["freeze_to_runnable_ms_p50"]),
            panel("Token gap that the client sees", lambda row: row["token_gap_ms_p50"]),
        ]
    )
