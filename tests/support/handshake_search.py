"""Every way through a world of `handshake_model.py`, and the first that doesn't end well."""

from collections.abc import Iterator
from dataclasses import dataclass

from tests.support.handshake_model import Explorer, Pair, State, Step, World

STATES_MAX = 400_000
"""A world that has more isn't small."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What `explore` found."""

    states: int
    pairs: frozenset[Pair]
    """Of states and events that came up."""
    problem: str = ""
    """Empty if every way leads to a clean end."""
    way: tuple[str, ...] = ()
    """How to come there."""


def explore(world: World) -> Finding:
    """Walk through every reachable state, depth first. No way may end anywhere but cleanly, or go in a circle; so every
    way comes to a clean end, whatever the order, without anybody's fairness. Stops at the first problem."""
    explorer = Explorer(world)
    start = explorer.start()
    on_way: dict[State, str] = {start: ""}
    over: set[State] = set()
    stack = [(start, _onward(explorer, start))]
    while stack:
        state, onward = stack[-1]
        step = next(onward, None)
        if step is None:
            stack.pop()
            del on_way[state]
            over.add(state)
            continue
        label, following = step
        if label.startswith("!") or following in on_way:
            problem = label[1:] if label.startswith("!") else "a circle"
            way = (*list(on_way.values())[1:], label)
            return Finding(len(over) + len(on_way), frozenset(explorer.pairs), problem, way)
        if following not in over:
            on_way[following] = label
            assert len(over) + len(on_way) <= STATES_MAX, "this world is too large"
            stack.append((following, _onward(explorer, following)))
    return Finding(len(over), frozenset(explorer.pairs))


def _onward(explorer: Explorer, state: State) -> Iterator[Step]:
    """The steps from a state; a label with "!" tells what is wrong with it as an end."""
    moved = False
    for step in explorer.steps(state):
        moved = True
        yield step
    if not moved and (problem := explorer.unclean(state)):
        yield f"!{problem}", state
    yield from explorer.troubles(state)
