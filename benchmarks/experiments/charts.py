"""An experiment's figure, as SVG beside its JSON: lines or points over two axes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 80, 170, 44, 60
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
"""Told apart by colour-blind readers too."""
TICKS = 5

Points = Sequence[tuple[float, float]]
Series = Mapping[str, Points]


@dataclass(frozen=True, slots=True)
class Axis:
    """From values to pixels."""

    place: Callable[[float], float]
    """0 to 1."""
    ticks: Sequence[float]


def draw(json_path: Path | None, title: str, x_label: str, y_label: str, series: Series, *, lines: bool = True) -> None:
    """Into `FILE.svg`, where there is a FILE to go beside and something to draw."""
    if json_path is not None and any(series.values()):
        svg = chart(title, x_label, y_label, series, lines=lines)
        json_path.with_suffix(".svg").write_text(svg, encoding="utf-8")


def chart(title: str, x_label: str, y_label: str, series: Series, *, lines: bool = True) -> str:
    """An SVG document. An axis whose positive values span more than a decade is logarithmic."""
    x = axis([point[0] for points in series.values() for point in points])
    y = axis([point[1] for points in series.values() for point in points])
    parts = [*_frame(title, x_label, y_label), *_ticks(x, y)]
    for number, (name, points) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        pixels = [(_x(x.place(a)), _y(y.place(b))) for a, b in points]
        if lines:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in pixels)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{colour}"/>' for a, b in pixels]
        parts.append(_text(WIDTH - RIGHT + 12, TOP + 12 + 18 * number, name, "start", colour))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def axis(values: Sequence[float]) -> Axis:
    """Around all values. Equal ones are in the middle."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low > 0 and high / low > 10:
        first, last = floor(log10(low)), ceil(log10(high))
        return Axis(lambda value: (log10(value) - first) / (last - first), [10.0**n for n in range(first, last + 1)])
    low = min(low, 0.0) if low < 0.5 * high else low
    span = (high - low) or max(abs(high), 1.0)
    begin = low if high > low else low - span / 2
    ticks = [begin + span * step / (TICKS - 1) for step in range(TICKS)]
    return Axis(lambda value: (value - begin) / span, ticks)


def _frame(title: str, x_label: str, y_label: str) -> list[str]:
    middle = (LEFT + WIDTH - RIGHT) / 2
    turned = f'<g transform="translate(18 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)">{_text(0, 0, y_label)}</g>'
    return [_text(middle, 24, title), _text(middle, HEIGHT - 16, x_label), turned]


def _ticks(x: Axis, y: Axis) -> list[str]:
    parts = []
    for tick in x.ticks:
        at = _x(x.place(tick))
        parts.append(_line(at, TOP, at, HEIGHT - BOTTOM) + _text(at, HEIGHT - BOTTOM + 18, f"{tick:.4g}"))
    for tick in y.ticks:
        at = _y(y.place(tick))
        parts.append(_line(LEFT, at, WIDTH - RIGHT, at) + _text(LEFT - 8, at + 4, f"{tick:.4g}", "end"))
    return parts


def _x(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'


def _text(x: float, y: float, text: str, anchor: str = "middle", colour: str = "#333333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
