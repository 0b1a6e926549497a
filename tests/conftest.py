"""What holds for all tests."""

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Soak tests run where they are asked for by name: another `-m` would replace one in `addopts`."""
    if "soak" in config.option.markexpr:
        return
    soaks = [item for item in items if item.get_closest_marker("soak")]
    if soaks:
        items[:] = [item for item in items if item not in soaks]
        config.hook.pytest_deselected(items=soaks)
