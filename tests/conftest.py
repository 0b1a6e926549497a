"""What holds for all tests."""

import gc
import os
import sys
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

# Also where Python is told to keep no bytecode: else each run, and each process that a test starts, would compile all
# of meshift and its tests anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A few examples, the same every time; with `--hypothesis-profile default`, as in `make soak`, new ones, four times as
# many.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=25)
hypothesis.settings.load_profile("repeatable")


def pytest_collection_finish() -> None:
    """What is there now stays; a collector that looked through it again and again took a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


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
