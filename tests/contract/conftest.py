"""A test class chooses its event loop: the attribute `loop_factory`, else a stock loop."""

import asyncio
from collections.abc import Callable

import pytest


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """A hook of pytest-asyncio."""
    chosen = getattr(getattr(item, "cls", None), "loop_factory", None)
    return {"chosen": chosen or asyncio.new_event_loop}
