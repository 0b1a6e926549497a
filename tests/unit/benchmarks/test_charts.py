"""The figures of experiments."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from meshift.benchmarks.experiments.charts import axis, chart, draw


def test_an_axis_is_logarithmic_when_values_span_more_than_a_decade() -> None:
    wide, narrow = axis([2.0, 300.0]), axis([3.0, 4.0])
    assert list(wide.ticks) == [1.0, 10.0, 100.0, 1000.0]
    assert wide.place(10.0) == pytest.approx(1 / 3)
    assert (narrow.place(3.0), narrow.place(4.0)) == (0.0, 1.0)
    assert axis([0.0, 5.0]).place(2.5) == 0.5
    assert 0 <= axis([7.0]).place(7.0) <= 1
    assert 0 <= axis([]).place(0.5) <= 1


def test_a_figure_has_every_series_within_its_frame() -> None:
    svg = chart("a < b", "x", "y", {"one": [(1, 10), (2, 2000)], "two": [(1.5, 30)]})
    root = ElementTree.fromstring(svg)
    circles = root.findall("{http://www.w3.org/2000/svg}circle")
    assert len(circles) == 3
    assert all(
        80 <= float(circle.attrib["cx"]) <= 550 and 44 <= float(circle.attrib["cy"]) <= 360 for circle in circles
    )
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b", "one", "two"} <= set(texts)


def test_it_lies_beside_the_json_and_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    draw(tmp_path / "told.json", "t", "x", "y", {"one": []})
    draw(None, "t", "x", "y", {"one": [(1, 1)]})
    assert not list(tmp_path.iterdir())
    draw(tmp_path / "told.json", "t", "x", "y", {"one": [(1, 1)]}, lines=False)
    assert "polyline" not in (tmp_path / "told.svg").read_text()
