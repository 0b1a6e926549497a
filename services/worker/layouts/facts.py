"""Between what engines say of layouts and messages."""

from meshift.backends.base import EngineLoad
from meshift.backends.layouts import LayoutChange, LayoutNow
from meshift.schemas.layouts import LayoutFacts, StageFacts
from meshift.schemas.reconfiguring import LayoutOrders


def facts_of(now: LayoutNow, load: EngineLoad) -> LayoutFacts:
    """For the planner."""
    return LayoutFacts(
        split=now.layout.layer_ranges,
        epoch=now.layout.epoch,
        layers_per_group=now.layout.layers_per_group,
        page_tokens=now.page_tokens,
        capacity=load.capacity,
        capacity_max=now.capacity_max,
        used=load.used + load.reserved,
        stages=tuple(
            StageFacts(budget=stage.budget, reserve=stage.reserve, layer_weights=stage.layer_weights, block=stage.block)
            for stage in now.stages
        ),
    )


def change_of(change_id: str, orders: LayoutOrders, deadline_s: float) -> LayoutChange:
    """For the engine."""
    return LayoutChange(change_id, orders.epoch, orders.target, orders.flags, deadline_s)
