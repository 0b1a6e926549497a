"""What holds for all tests."""

import hypothesis
import pytest

# The same examples every time; `pytest --hypothesis-profile default` looks for new ones.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Soak tests run where they are asked for by name: another `-m` would replace one in `addopts`.

    Of several processes one runs all tests with a real SGLang, which share started engines, from the start on; each of
    the other files stays whole.
    """
    if "soak" not in config.option.markexpr:
        soaks = [item for item in items if item.get_closest_marker("soak")]
        items[:] = [item for item in items if not item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=soaks)
    items.sort(key=lambda item: item.get_closest_marker("sglang") is None)
    for item in items:
        group = "sglang" if item.get_closest_marker("sglang") else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
