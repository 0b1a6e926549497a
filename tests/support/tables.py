"""What holds of every transition table."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pytest

from meshift.schemas.errors import InternalError

StateT = TypeVar("StateT")


def check_pair(
    transitions: Mapping[tuple[StateT, Any], StateT], next_state: Callable[[Any, Any], StateT], state: Any, event: Any
) -> None:
    """A declared pair leads where the table says; an undeclared one is a bug, and told as one."""
    if (state, event) in transitions:
        assert next_state(state, event) is transitions[state, event]
    else:
        with pytest.raises(InternalError):
            next_state(state, event)


def reachable(transitions: Mapping[tuple[StateT, Any], StateT], start: StateT) -> set[StateT]:
    """`start`, and all states that something leads to from there."""
    found: set[StateT] = set()
    left = [start]
    while left:
        state = left.pop()
        if state not in found:
            found.add(state)
            left += [after for (before, _), after in transitions.items() if before is state]
    return found
