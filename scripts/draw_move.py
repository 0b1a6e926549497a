"""Draws a move of a request out of a trace file (`MESHIFT_TRACE_FILE`): the spans of the move, and above them what the
request's own trace shows meanwhile.

    python scripts/draw_move.py traces.jsonl docs/move-trace.svg [--move TRACE_ID]
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

MOVE = "meshift.move"
GENERATE = "meshift.generate"

WIDTH, LABELS, RIGHT, TOP, ROW, BAR = 1000, 250, 20, 64, 26, 16
MARGIN_SHARE = 0.08
"""Of the move's time, shown before and after it."""
TICKS = 8

COLOURS = {
    GENERATE: "#8ab17d",
    MOVE: "#264653",
    "meshift.move.reserve": "#e9c46a",
    "meshift.move.round": "#2a9d8f",
    "meshift.move.transfer": "#83c5be",
    "meshift.move.freeze": "#e76f51",
    "meshift.move.commit": "#9b5de5",
    "meshift.move.release": "#adb5bd",
}
OTHER_COLOUR = "#6c757d"


class DrawingError(Exception):
    """There is nothing to draw; the message says why."""


@dataclass
class Span:
    """One line of the file. Times in ms."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    begin_ms: float
    end_ms: float
    attributes: dict[str, Any]
    links: list[str]
    """Trace ids."""
    instance: str

    @property
    def took_ms(self) -> float:
        return self.end_ms - self.begin_ms


def read_spans(lines: Iterable[str]) -> list[Span]:
    """All spans of a trace file."""
    return [_span(json.loads(line)) for line in lines if line.strip()]


def _span(content: dict[str, Any]) -> Span:
    return Span(
        name=content["name"],
        trace_id=content["context"]["trace_id"],
        span_id=content["context"]["span_id"],
        parent_id=content["parent_id"],
        begin_ms=_ms(content["start_time"]),
        end_ms=_ms(content["end_time"]),
        attributes=content["attributes"] or {},
        links=[link["context"]["trace_id"] for link in content["links"]],
        instance=content["resource"]["attributes"].get("service.instance.id", ""),
    )


def _ms(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() * 1e3


def choose_move(spans: Sequence[Span], trace_id: str | None) -> Span:
    """The one that is asked for; else the newest that came about. Raises DrawingError."""
    moves = [span for span in spans if span.name == MOVE]
    if trace_id is not None:
        moves = [span for span in moves if span.trace_id.removeprefix("0x") == trace_id.removeprefix("0x")]
    else:
        moves = [span for span in moves if span.attributes.get("meshift.move.outcome") == "moved"]
    if not moves:
        raise DrawingError("the file has no such move" if trace_id else "the file has no move that came about")
    return max(moves, key=lambda span: span.begin_ms)


@dataclass(frozen=True)
class Row:
    """A line of the picture."""

    span: Span
    label: str
    note: str = ""


def rows_of(spans: Sequence[Span], move: Span) -> list[Row]:
    """The request's spans that overlap with the move, then the move's own, as a tree in order of time."""
    request = [span for span in spans if span.name == GENERATE and span.trace_id in move.links]
    seen = [span for span in request if span.end_ms > move.begin_ms and span.begin_ms < move.end_ms]
    rows = [Row(span, f"request runs at {span.instance}") for span in sorted(seen, key=lambda span: span.begin_ms)]
    own = [span for span in spans if span.trace_id == move.trace_id]
    return [*rows, *_tree(own, move, 0)]


def _tree(spans: Sequence[Span], root: Span, depth: int) -> list[Row]:
    name = root.name.removeprefix(f"{MOVE}.")
    label = "\u00a0\u00a0" * depth + (root.name if depth == 0 else name)
    below = sorted((span for span in spans if span.parent_id == root.span_id), key=lambda span: span.begin_ms)
    rows = [Row(root, label, note_of(root))]
    for span in below:
        rows += _tree(spans, span, depth + 1)
    return rows


def note_of(span: Span) -> str:
    """What its attributes say."""
    known = span.attributes
    parts = [f"{span.took_ms:.1f} ms"]
    if span.name == MOVE:
        parts.append(f"{known.get('meshift.move.mode')}, {known.get('meshift.move.rounds')} rounds")
        parts.append(f"stopped for {1e3 * known.get('meshift.move.frozen', 0.0):.1f} ms")
    tokens, size = known.get("meshift.transfer.tokens"), known.get("meshift.transfer.bytes")
    if tokens and size:
        parts.append(f"{tokens} token{'s' if tokens > 1 else ''}, {size / 1e6:.2f} MB")
    return "; ".join(parts)


@dataclass(frozen=True)
class Scale:
    """From times to places."""

    begin_ms: float
    end_ms: float

    def x(self, at_ms: float) -> float:
        share = (min(max(at_ms, self.begin_ms), self.end_ms) - self.begin_ms) / (self.end_ms - self.begin_ms)
        return LABELS + share * (WIDTH - LABELS - RIGHT)


def draw(spans: Sequence[Span], move: Span) -> str:
    """The picture."""
    rows = rows_of(spans, move)
    margin_ms = max(1.0, MARGIN_SHARE * move.took_ms)
    scale = Scale(move.begin_ms - margin_ms, move.end_ms + margin_ms)
    height = TOP + ROW * len(rows) + 34
    known = move.attributes
    title = f"{known.get('meshift.source')} to {known.get('meshift.destination')}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(16, 24, f"A running request moves from {title}", size=16, weight="bold"),
        _text(
            16, 44, f"request {known.get('meshift.request.id')}, hop {known.get('meshift.request.hop')}", colour="#555"
        ),
        *_axis(scale, move, height),
        *_stopped(scale, spans, move, height),
        *(line for place, row in enumerate(rows) for line in _bar(scale, row, TOP + ROW * place)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _axis(scale: Scale, move: Span, height: int) -> list[str]:
    step_ms = _step(move.took_ms / TICKS)
    lines = []
    for number in range(int(move.took_ms / step_ms) + 1):
        x = scale.x(move.begin_ms + number * step_ms)
        lines.append(f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{height - 28}" stroke="#e3e3e3"/>')
        lines.append(_text(x, height - 12, f"{number * step_ms:g} ms", anchor="middle", colour="#555"))
    return lines


def _stopped(scale: Scale, spans: Sequence[Span], move: Span, height: int) -> list[str]:
    """A band over the time in which nobody steps the request: it ends where its span at the destination begins."""
    frozen_ms = 1e3 * move.attributes.get("meshift.move.frozen", 0.0)
    later = [span for span in spans if span.name == GENERATE and span.trace_id in move.links]
    begins = [span.begin_ms for span in later if move.begin_ms < span.begin_ms < move.end_ms]
    if not frozen_ms or not begins:
        return []
    left, right = scale.x(max(begins) - frozen_ms), scale.x(max(begins))
    size = f'width="{right - left:.1f}" height="{height - TOP - 28}"'
    return [f'<rect x="{left:.1f}" y="{TOP}" {size} fill="#e76f51" fill-opacity="0.15"/>']


def _step(least: float) -> float:
    """A round number that isn't less."""
    power = 1.0
    while power * 10 <= least:
        power *= 10
    while power > least:
        power /= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)


def _bar(scale: Scale, row: Row, y: int) -> list[str]:
    span = row.span
    left, right = scale.x(span.begin_ms), scale.x(span.end_ms)
    width = max(1.5, right - left)
    colour = COLOURS.get(span.name, OTHER_COLOUR)
    bar = f'<rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2" fill="{colour}"/>'
    lines = [_text(16, y + 13, row.label), bar]
    # Beside the bar, where there is room: after it, before it, else on it.
    needed = 6.3 * len(row.note) + 12
    if not row.note:
        return lines
    if left + width + needed < WIDTH:
        lines.append(_text(left + width + 6, y + 13, row.note, size=12, colour="#333"))
    elif left - needed > LABELS:
        lines.append(_text(left - 6, y + 13, row.note, size=12, anchor="end", colour="#333"))
    else:
        lines.append(_text(left + 6, y + 13, row.note, size=12, colour="#ffffff"))
    return lines


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 13,
    anchor: str = "start",
    colour: str = "#222",
    weight: str = "normal",
) -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" fill="{colour}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("traces", type=Path, help="JSON lines, one span each")
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    parser.add_argument("--move", help="trace id; without it, the newest move that came about")
    options = parser.parse_args(arguments)
    spans = read_spans(options.traces.read_text().splitlines())
    try:
        options.picture.write_text(draw(spans, choose_move(spans, options.move)))
    except DrawingError as error:
        print(f"draw_move: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
