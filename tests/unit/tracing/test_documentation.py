"""docs/operations.md tells of every metric, and its alerts name series that exist."""

import re
from pathlib import Path

from meshift.tracing.metrics import METRICS

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "operations.md").read_text()
SERIES = {name for metric in METRICS.values() for name in metric.series}


def test_every_metric_is_in_the_table_as_it_is() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", TEXT, re.MULTILINE))
    for family, metric in METRICS.items():
        labels = f" by {', '.join(f'`{label}`' for label in metric.labels)}" if metric.labels else ""
        assert rows[family] == f"{metric.kind}{labels}. {metric.help}"


def test_alerts_and_hints_name_series_that_exist() -> None:
    named = set(re.findall(r"\b(?:meshift|gen_ai)_\w+", TEXT))
    assert named <= SERIES | set(METRICS)
    assert any(name in SERIES - set(METRICS) for name in named)
