"""The move benchmark's figures, from its raw samples alone. Pure.

Samples are plain dictionaries, the lines of `FILE.raw.jsonl`; `measure` says which:

- `circumstances`: what was run, and how; `token_bytes` is KV of one token, from the model's configuration.
- `stream`: one request: `output` ids; `steps`, each `[instance, start, count, emitted_ns]`; the client's `chunks`, each
  `[ns, characters]`; `token_chars`, how many characters of the text the first tokens make.
- `move`: one move of one stream: the source's `report`, and `prefilled`, by how much the destination engine's count of
  computed prompt tokens grew from before the order until tokens came.
"""

import statistics
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

Sample = dict[str, Any]

UNDISTURBED, MOVED = "undisturbed", "moved"
"""Modes of a stream; each of its moves has its own."""

MODES = ("live", "blocking", "recompute")
STEPS_AFTER = 8
"""Decode steps at the destination, after a move, that its token gap is compared with."""


class SamplesError(Exception):
    """Samples that contradict one another: no figure can be trusted."""


@dataclass(frozen=True)
class MoveFigure:
    """What one move came to."""

    mode: str
    tokens: int
    """Nominal context."""
    context: int
    """Tokens with KV when it was frozen."""
    frozen_ms: float
    gap_ms: float
    """Between the last token of the source and the first of the destination, as the client got them."""
    step_ms: float
    """Of the destination, median of those that followed."""
    rounds: int
    byte_count: int
    recomputed: int

    @property
    def gap_steps(self) -> float:
        """The gap in decode steps of the destination."""
        return self.gap_ms / self.step_ms


def of_measure(samples: Iterable[Sample], measure: str) -> list[Sample]:
    """The samples of one kind."""
    return [sample for sample in samples if sample["measure"] == measure]


def client_times_ns(stream: Sample) -> list[int]:
    """When each token had its text with the client: with the chunk that completes it. A token that has no text of its
    own comes with the text before it."""
    times = [ns for ns, _ in stream["chunks"]]
    ends = list(accumulate(count for _, count in stream["chunks"]))
    if not ends or stream["token_chars"][-1] > ends[-1]:
        raise SamplesError(f"{stream['name']}: the client has {ends[-1:]} characters of {stream['token_chars'][-1]}")
    return [times[bisect_left(ends, max(1, chars))] for chars in stream["token_chars"]]


def step_times_ms(stream: Sample) -> list[float]:
    """Of decode steps: between two steps of one instance, one token each."""
    return [
        (later[3] - earlier[3]) / 1e6
        for earlier, later in pairwise(stream["steps"])
        if earlier[0] == later[0] and later[2] == 1
    ]


def arrivals(stream: Sample) -> list[int]:
    """The first step at each destination, as an index into `steps`."""
    return [index for index, (a, b) in enumerate(pairwise(stream["steps"]), 1) if a[0] != b[0]]


def move_figures(samples: Sequence[Sample]) -> list[MoveFigure]:
    """Of all moves that were made and count. Raises SamplesError."""
    streams = {stream["name"]: stream for stream in of_measure(samples, "stream")}
    figures = []
    for name, stream in streams.items():
        moves = [move for move in of_measure(samples, "move") if move["stream"] == name and _moved(move)]
        places = arrivals(stream)
        if len(places) != len(moves):
            raise SamplesError(f"{name}: {len(moves)} moves, and {len(places)} changes of its owner")
        times_ns = client_times_ns(stream) if moves else []
        figures += [_figure(stream, times_ns, move, at) for move, at in zip(moves, places, strict=True)]
    return figures


def _moved(move: Sample) -> bool:
    return bool(move["report"]["outcome"] == "moved")


def _figure(stream: Sample, times_ns: Sequence[int], move: Sample, at: int) -> MoveFigure:
    steps, report = stream["steps"], move["report"]
    first = steps[at][1]
    if (steps[at - 1][0], steps[at][0]) != (move["source"], move["destination"]) or report["mode"] != move["mode"]:
        raise SamplesError(f"{stream['name']}: not the move that was ordered: {report}")
    after = [(b[3] - a[3]) / 1e6 for a, b in pairwise(steps[at : at + 1 + STEPS_AFTER])]
    frozen_ms = report["figures"]["frozen_ns"] / 1e6
    if move["mode"] == "recompute":
        # The engine may step it at once, but what it steps is a prefill: a decode step is possible after that, when its
        # first token is there.
        frozen_ms = (steps[at][3] - steps[at - 1][3]) / 1e6
    return MoveFigure(
        mode=move["mode"],
        tokens=move["tokens"],
        context=stream["prompt_tokens"] + first - 1,
        frozen_ms=frozen_ms,
        gap_ms=(times_ns[first] - times_ns[first - 1]) / 1e6,
        step_ms=statistics.median(after),
        rounds=report["figures"]["rounds"],
        byte_count=report["figures"]["byte_count"],
        recomputed=move["prefilled"],
    )


def problems(samples: Sequence[Sample]) -> list[str]:
    """What makes a move wrong rather than slow; empty if all is well."""
    found = [
        f"{move['stream']}: {move['mode']} came to {move['report']['outcome']}: {move['report']['reason']}"
        for move in of_measure(samples, "move")
        if not _moved(move)
    ]
    token_bytes = of_measure(samples, "circumstances")[0]["token_bytes"]
    for figure in move_figures(samples):
        wanted = 0 if figure.mode == "recompute" else figure.context * token_bytes
        if figure.byte_count != wanted:
            found.append(f"{figure.mode} of {figure.context} tokens sent {figure.byte_count} bytes, not {wanted}")
    found += [f"{stream['name']}: not the undisturbed output" for stream in altered(samples)]
    return found


def altered(samples: Sequence[Sample]) -> list[Sample]:
    """Streams whose output isn't that of the undisturbed run of the same prompt, in ids or in text."""
    streams = of_measure(samples, "stream")
    expected = {s["prompt"]: (s["output"], s["text"]) for s in streams if s["mode"] == UNDISTURBED}
    return [s for s in streams if (s["output"], s["text"]) != expected[s["prompt"]]]


def rows(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """One for each context and mode."""
    # Any of its moves may have altered a stream: each counts as not identical.
    names = {stream["name"] for stream in altered(samples)}
    wrong = {(move["mode"], move["tokens"]) for move in of_measure(samples, "move") if move["stream"] in names}
    figures = move_figures(samples)
    found = []
    for tokens in sorted({figure.tokens for figure in figures}):
        for mode in MODES:
            moves = [figure for figure in figures if (figure.mode, figure.tokens) == (mode, tokens)]
            if moves:
                found.append(_row(mode, tokens, moves, identical=(mode, tokens) not in wrong))
    return found


def _row(mode: str, tokens: int, moves: Sequence[MoveFigure], *, identical: bool) -> dict[str, Any]:
    return {
        "mode": mode,
        "tokens": tokens,
        "freeze_to_runnable_ms_p50": round(statistics.median(move.frozen_ms for move in moves), 3),
        "token_gap_ms_p50": round(statistics.median(move.gap_ms for move in moves), 3),
        "rounds": statistics.median(move.rounds for move in moves),
        "bytes": round(statistics.median(move.byte_count for move in moves)),
        "recomputed_tokens": round(statistics.median(move.recomputed for move in moves)),
        "identical": identical,
        "repeats": len(moves),
    }


def decode_step_ms(samples: Sequence[Sample]) -> float:
    """The median over all decode steps of the undisturbed runs."""
    undisturbed = [s for s in of_measure(samples, "stream") if s["mode"] == UNDISTURBED]
    return statistics.median(step for stream in undisturbed for step in step_times_ms(stream))
