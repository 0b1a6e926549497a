"""The Grafana dashboard asks for metrics that exist, and shows all that there are."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshift.tracing.metrics import METRICS, Kind

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD = ROOT / "compose" / "grafana" / "dashboards" / "meshift.json"

NOT_SHOWN: set[str] = set()
"""Families that are exported and deliberately on no panel."""

PROCESS_SERIES = {"process_cpu_seconds_total", "process_resident_memory_bytes"}
"""Of prometheus_client's own collector."""

OURS = {name: metric for metric in METRICS.values() for name in metric.series}

WORDS = {
    *("sum", "max", "by", "on", "rate", "histogram_quantile", "le"),
    *(label for metric in METRICS.values() for label in metric.labels),
}


def dashboard() -> dict[str, Any]:
    return dict(json.loads(DASHBOARD.read_text()))


def queries() -> Iterator[tuple[str, str]]:
    """(panel, PromQL) of each."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def names_in(query: str) -> set[str]:
    """The names of series: identifiers that are neither a label in braces, a function nor a word of the language."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"", " ", query)
    return set(re.findall(r"[A-Za-z_:][A-Za-z0-9_:]*", bare)) - WORDS


QUERIES = list(queries())


@pytest.mark.parametrize(("panel", "query"), QUERIES, ids=[f"{panel}: {query}" for panel, query in QUERIES])
def test_every_query_names_series_that_exist(panel: str, query: str) -> None:
    names = names_in(query)
    assert names, panel
    assert names <= set(OURS) | PROCESS_SERIES


@pytest.mark.parametrize(("panel", "query"), QUERIES, ids=[f"{panel}: {query}" for panel, query in QUERIES])
def test_labels_are_those_of_the_metric(panel: str, query: str) -> None:
    metrics = [OURS[name] for name in names_in(query) if name in OURS]
    if not metrics:
        return
    common = set.intersection(*(set(metric.labels) for metric in metrics)) | {"le"}
    filtered = {label for braces in re.findall(r"\{([^}]*)\}", query) for label in re.findall(r"(\w+)\s*[=!]", braces)}
    grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")}
    labels = set().union(*(metric.labels for metric in metrics)) | {"le"}
    assert filtered <= labels, panel
    assert grouped <= (common if len(metrics) > 1 else labels), panel


@pytest.mark.parametrize(("panel", "query"), QUERIES, ids=[f"{panel}: {query}" for panel, query in QUERIES])
def test_counters_are_rated_and_histograms_are_quantiles(panel: str, query: str) -> None:
    for name in names_in(query) & set(OURS):
        if OURS[name].kind is Kind.COUNTER:
            assert f"rate({name}" in query, panel
        if OURS[name].kind is Kind.HISTOGRAM:
            assert query.startswith("histogram_quantile("), panel


def test_every_metric_is_shown_or_left_out_on_purpose() -> None:
    shown = {OURS[name].family for _, query in QUERIES for name in names_in(query) if name in OURS}
    assert shown | NOT_SHOWN == set(METRICS)
    assert not shown & NOT_SHOWN


def test_it_can_be_provisioned() -> None:
    """From a file: no `id` of a database, a fixed `uid`, and the data source by choice."""
    content = dashboard()
    assert "id" not in content
    assert content["uid"] == "meshift"
    (source,) = content["templating"]["list"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    ids = [panel["id"] for panel in content["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in content["panels"]:
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == f"${{{source['name']}}}"


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_parser_sees_a_name_that_does_not_exist() -> None:
    assert names_in('sum by (le) (rate(meshift_nonsense_total{state="used"}[5m]))') == {"meshift_nonsense_total"}
