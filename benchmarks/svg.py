"""Small line charts as SVG, for results that are looked at in a browser or a README."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 420, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 36, 76
COLOURS = ("#1b6ca8", "#c8553d", "#588157", "#7b5ea7")


@dataclass(frozen=True)
class Chart:
    """One panel. The y axis is logarithmic; values that aren't positive are left out."""

    title: str
    x_label: str
    y_label: str
    x: Sequence[str]
    """Of each value, at equal distances."""
    series: Mapping[str, Sequence[float | None]]


def document(charts: Sequence[Chart]) -> str:
    """All charts side by side."""
    parts = [f'<g transform="translate({index * WIDTH} 0)">{_panel(chart)}</g>\n' for index, chart in enumerate(charts)]
    width = WIDTH * len(charts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" viewBox="0 0 {width} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">\n'
        f'<rect width="{width}" height="{HEIGHT}" fill="white"/>\n{"".join(parts)}</svg>\n'
    )


def decades(values: Sequence[float]) -> tuple[int, int]:
    """Powers of ten around all positive values, at least one apart."""
    positive = [value for value in values if value > 0]
    if not positive:
        return 0, 1
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    return low, max(high, low + 1)


def _panel(chart: Chart) -> str:
    low, high = decades([value for values in chart.series.values() for value in values if value is not None])

    def x_of(index: int) -> float:
        step = (WIDTH - LEFT - RIGHT) / max(1, len(chart.x))
        return LEFT + step * (index + 0.5)

    def y_of(value: float) -> float:
        share = (math.log10(value) - low) / (high - low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    parts = [_text(WIDTH / 2, 18, chart.title, weight="bold")]
    for power in range(low, high + 1):
        y = y_of(10.0**power)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{10.0**power:g}", anchor="end"))
    parts += [_text(x_of(index), HEIGHT - BOTTOM + 18, label) for index, label in enumerate(chart.x)]
    parts.append(_text(WIDTH / 2, HEIGHT - BOTTOM + 36, chart.x_label))
    parts.append(f'<g transform="translate(14 {HEIGHT / 2 - 20}) rotate(-90)">{_text(0, 0, chart.y_label)}</g>')
    for number, (name, values) in enumerate(chart.series.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = [(x_of(i), y_of(value)) for i, value in enumerate(values) if value is not None and value > 0]
        parts.append(_line(points, colour))
        parts.append(_text(LEFT + 110 * number, HEIGHT - 14, name, anchor="start", colour=colour, weight="bold"))
    return "\n".join(parts)


def _line(points: Sequence[tuple[float, float]], colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>{dots}'


def _text(x: float, y: float, text: str, *, anchor: str = "middle", colour: str = "#222222", weight: str = "") -> str:
    bold = f' font-weight="{weight}"' if weight else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{bold}>{escape(text)}</text>'
