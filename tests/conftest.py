"""What holds for all tests."""

from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

# The same examples every time; `pytest --hypothesis-profile default` looks for new ones.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Soak tests run where they are asked for by name: another `-m` would replace one in `addopts`. What starts a real
    SGLang comes first: it takes longest."""
    if "soak" not in config.option.markexpr:
        soaks = [item for item in items if item.get_closest_marker("soak")]
        items[:] = [item for item in items if not item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=soaks)
    items.sort(key=lambda item: not starts_sglang(item.nodeid))


def starts_sglang(node_id: str) -> bool:
    """Whether a test may start a real SGLang, by its file."""
    path = node_id.partition("::")[0]
    return path.startswith("tests/integration/sglang/") or path.endswith("_sglang.py")


class OneForSglang(LoadScopeScheduling):  # type: ignore[misc]
    """Of several processes one runs all tests with a real SGLang: they share started engines, and a small machine can't
    hold more. Other files stay whole."""

    def _split_scope(self, nodeid: str) -> str:
        return "sglang" if starts_sglang(nodeid) else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneForSglang:
    """For `--dist load`, and any other."""
    return OneForSglang(config, log)
