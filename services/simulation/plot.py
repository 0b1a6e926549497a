"""One chart as SVG: for each policy, which share of the requests had its first token by when."""

from collections.abc import Mapping, Sequence
from math import ceil, floor, log10
from xml.etree import ElementTree

WIDTH, HEIGHT, MARGIN = 720, 420, 60
POINTS_MAX = 200
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Told apart by colour-blind readers too."""


def distribution_chart(title: str, unit: str, series: Mapping[str, Sequence[float]]) -> str:
    """An SVG document. The horizontal axis is logarithmic; values below a millisecond are drawn there."""
    svg = ElementTree.Element(
        "svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {HEIGHT}", attrib={"font-family": "sans-serif"}
    )
    ElementTree.SubElement(svg, "rect", width=str(WIDTH), height=str(HEIGHT), fill="white")
    values = [max(value, 1e-3) for points in series.values() for value in points] or [1.0]
    low, high = floor(log10(min(values))), max(ceil(log10(max(values))), floor(log10(min(values))) + 1)
    _text(svg, WIDTH / 2, 24, title, "middle", 16)
    _text(svg, WIDTH / 2, HEIGHT - 12, unit, "middle")
    for decade in range(low, high + 1):
        x = _x(10.0**decade, low, high)
        _line(svg, x, MARGIN / 1.5, x, HEIGHT - MARGIN)
        _text(svg, x, HEIGHT - MARGIN + 18, f"{10.0**decade:g}", "middle")
    for share in (0.0, 0.5, 0.9, 0.99, 1.0):
        _line(svg, MARGIN, _y(share), WIDTH - MARGIN, _y(share))
        _text(svg, MARGIN - 6, _y(share) + 4, f"{share:.0%}", "end")
    for index, (name, points) in enumerate(series.items()):
        _curve(svg, index, name, sorted(max(value, 1e-3) for value in points), low, high)
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def _curve(svg: ElementTree.Element, index: int, name: str, ordered: Sequence[float], low: int, high: int) -> None:
    colour = COLOURS[index % len(COLOURS)]
    count = max(len(ordered), 1)
    shares = [place / POINTS_MAX for place in range(POINTS_MAX + 1)] + [0.999, 0.9999]
    drawn = [(ordered[min(count - 1, int(count * share))], share) for share in sorted(shares) if ordered]
    path = " ".join(f"{_x(value, low, high):.1f},{_y(share):.1f}" for value, share in drawn)
    ElementTree.SubElement(svg, "polyline", points=path, fill="none", stroke=colour, attrib={"stroke-width": "2"})
    _text(svg, WIDTH - MARGIN - 8, HEIGHT - MARGIN - 12 - 18 * index, name, "end", colour=colour)


def _x(value: float, low: int, high: int) -> float:
    return MARGIN + (log10(value) - low) / (high - low) * (WIDTH - 2 * MARGIN)


def _y(share: float) -> float:
    return HEIGHT - MARGIN - share * (HEIGHT - 1.67 * MARGIN)


def _line(svg: ElementTree.Element, x1: float, y1: float, x2: float, y2: float) -> None:
    ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    ElementTree.SubElement(svg, "line", {key: f"{value:.1f}" for key, value in ends.items()}, stroke="#ddd")


def _text(
    svg: ElementTree.Element, x: float, y: float, text: str, anchor: str, size: int = 12, colour: str = "#333"
) -> None:
    attributes = {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor, "font-size": str(size), "fill": colour}
    ElementTree.SubElement(svg, "text", attributes).text = text
