"""What is to be done at the next step boundary, once no step runs: a new capacity, a new layout."""

from collections.abc import Callable

Action = Callable[[], int]
"""Returns for how long no step may begin, in nanoseconds; 0: the next one begins at once."""


class Holds:
    """Done in the order in which it was asked for."""

    def __init__(self) -> None:
        self._actions: list[Action] = []

    def ask(self, action: Action) -> None:
        """At the next boundary."""
        self._actions.append(action)

    def apply(self) -> int:
        """Do all of it; for how long the engine is held."""
        actions, self._actions = self._actions, []
        return sum(action() for action in actions)
