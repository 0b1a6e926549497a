"""When little enough lags."""

import pytest

from meshift.schemas.layouts import LayoutFlags
from meshift.services.coordinator.convergence import is_close
from tests.unit.schemas.samples import CHANGE, ORDERS


@pytest.mark.parametrize(
    ("lag", "loaded", "running", "flags", "close"),
    [
        (49, 4, 0, LayoutFlags(), True),
        (50, 4, 0, LayoutFlags(), False),
        (50, 4, 25, LayoutFlags(), False),
        (50, 4, 26, LayoutFlags(), True),
        (0, 3, 0, LayoutFlags(), False),
        (0, 0, 0, LayoutFlags(no_async=True), True),
        (9_999, 4, 0, LayoutFlags(no_patch=True), True),
        (9_999, 3, 0, LayoutFlags(no_patch=True), False),
        (9_999, 0, 0, LayoutFlags(restart=True), True),
    ],
)
def test_close(lag: int, loaded: int, running: int, flags: LayoutFlags, close: bool) -> None:
    near, far = [
        CHANGE.stages[0].model_copy(update={"layers_loaded": loaded, "lag_tokens": tokens}) for tokens in (0, lag)
    ]
    orders = ORDERS.model_copy(update={"tau_tokens": 50, "flags": flags})
    change = CHANGE.model_copy(update={"stages": (near, far), "orders": orders})
    assert change.lag_tokens == lag
    assert is_close(change, running) is close
