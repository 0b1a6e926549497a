"""The chart."""

from xml.etree import ElementTree

from meshift.services.simulation.plot import distribution_chart


def test_a_curve_a_series_within_the_picture() -> None:
    svg = distribution_chart("a < b", "s", {"one": [0.0, 0.01, 5.0], "two": [100.0] * 50, "none": []})
    root = ElementTree.fromstring(svg)
    curves = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(curves) == 3
    for curve in curves[:2]:
        points = [point.split(",") for point in curve.attrib["points"].split()]
        across, down = ([float(point[axis]) for point in points] for axis in (0, 1))
        assert across == sorted(across)
        assert down == sorted(down, reverse=True)
        assert min(across + down) >= 0
        assert max(across) <= 720
        assert max(down) <= 420
    texts = [element.text for element in root.findall("{http://www.w3.org/2000/svg}text")]
    assert {"a < b", "s", "one", "two", "0.001", "100", "99%"} <= set(texts)
