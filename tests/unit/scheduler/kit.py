"""Observations for tests of policies."""

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from meshift.schemas.instances import InstanceState
from meshift.services.scheduler.policy.observation import InstanceObservation
from meshift.services.scheduler.policy.settings import PolicyName, PolicySettings
from tests.support.reports import load_report

CAPACITY = 1000


def settings(policy: PolicyName = "meshift", **sections: Mapping[str, Any]) -> PolicySettings:
    """The defaults with changes by section."""
    return PolicySettings.model_validate({"policy": policy, **sections})


PLAIN = settings(
    dispatch={"margin_steps": 0, "queues_share": 1}, migration={"out_below": 3, "in_above": 30, "requeue": False}
)
"""The numbers that are easy to follow."""


def instance(
    name: str = "a",
    *,
    used: int = 0,
    running: int = 0,
    charged: tuple[int, int] = (0, 0),
    moving_in: int = 0,
    draining: bool = False,
    **report: Any,
) -> InstanceObservation:
    """One of 1,000 tokens: what isn't used, cached or reserved is free."""
    free = CAPACITY - used - report.get("cached", 0) - report.get("reserved", 0)
    state = InstanceState.DRAINING if draining else InstanceState.READY
    made = load_report(name, used=used, free=free, running=running, state=state, **report)
    return InstanceObservation(made, *charged, moving_in)


@st.composite
def instances(draw: st.DrawFn, min_size: int = 1, max_size: int = 6) -> list[InstanceObservation]:
    """Any consistent ones."""
    made = []
    for index in range(draw(st.integers(min_size, max_size))):
        used = draw(st.integers(0, CAPACITY))
        reserved = draw(st.integers(0, CAPACITY - used))
        head = draw(st.integers(0, 400))
        made.append(
            instance(
                f"i{index}",
                used=used,
                reserved=reserved,
                running=draw(st.integers(1, 20)) if used else 0,
                waiting=draw(st.integers(1, 5)) if head else 0,
                head_demand=head,
                queued_demand=head + (draw(st.integers(0, 500)) if head else 0),
                headroom=draw(st.sampled_from([0, 0, 400])),
                charged=draw(st.tuples(st.integers(0, 300), st.integers(0, 3))),
                draining=draw(st.booleans()) and draw(st.booleans()),
            )
        )
    return made
