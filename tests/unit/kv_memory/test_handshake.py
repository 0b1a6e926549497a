"""The two-phase handshake, in every interleaving of small worlds: no way through them ends but cleanly, and none goes
in a circle. Without one of its rules there is a deadlock, which the search finds."""

from functools import cache

import pytest

from meshift.kv_memory.transport.distributed.table import (
    RECEIVER,
    SENDER,
    Effect,
    IllegalTransition,
    ReceiverEvent,
    ReceiverState,
    ReceiverTable,
    SenderEvent,
    SenderState,
    SenderTable,
    receiver_step,
    sender_step,
)
from tests.support.handshake_model import Operation, World
from tests.support.handshake_search import Finding, explore

_S, _SE, _R, _RE, _F = SenderState, SenderEvent, ReceiverState, ReceiverEvent, Effect

BOTH_WAYS = ((0, 1), (1, 0))
CIRCLE = ((0, 1), (1, 2), (2, 0))

STEP = Operation("step", (0, 1))
"""Of a pipeline of two stages: one sends, the other waits for it."""
STEPS = (STEP, Operation("back", (0, 1)), Operation("next step", (0, 1), waits=False))
REDUCE = Operation("all-reduce", (0, 1, 2))

CALM = {
    "two ranks, both ways, in pieces, beside a pipeline": World(2, BOTH_WAYS, STEPS, pieces=2),
    "three ranks in a circle, beside collectives": World(3, CIRCLE, (REDUCE,)),
    "three ranks, both ways between neighbours": World(3, ((0, 1), (1, 0), (1, 2), (2, 1))),
}
TROUBLED = {
    "both ways, an end gives up": World(2, BOTH_WAYS, (STEP,), give_ups=1),
    "up in pieces, two ends give up": World(2, ((1, 0),), STEPS[:2], pieces=2, give_ups=2),
    "down in pieces, two ends give up": World(2, ((0, 1),), STEPS[:2], pieces=2, give_ups=2),
    "both ways, a rank dies": World(2, BOTH_WAYS, (STEP,), pieces=2, deaths=1),
    "one way, an end gives up and a rank dies": World(2, ((1, 0),), STEPS[:2], pieces=2, give_ups=1, deaths=1),
    "two senders of a receiver, an end gives up": World(3, ((0, 2), (1, 2)), (STEP,), give_ups=1),
    "a chain, a rank dies": World(3, ((0, 1), (1, 2)), (REDUCE,), deaths=1),
}


WORLDS = CALM | TROUBLED


@cache
def search(name: str) -> Finding:
    return explore(WORLDS[name])


def check(finding: Finding) -> None:
    assert not finding.problem, "\n".join((finding.problem, *finding.way))
    assert finding.states > 100, "it has seen next to nothing"


@pytest.mark.parametrize("name", CALM)
def test_whatever_the_order_all_is_sent_and_inference_goes_on(name: str) -> None:
    check(search(name))


@pytest.mark.parametrize("name", TROUBLED)
def test_whoever_gives_up_or_dies_when_nobody_waits_for_ever(name: str) -> None:
    check(search(name))


@pytest.mark.soak
@pytest.mark.parametrize(
    "world",
    [
        World(3, CIRCLE, (REDUCE,), give_ups=1),
        World(3, ((0, 1), (1, 0), (1, 2), (2, 1)), (REDUCE,)),
        World(2, BOTH_WAYS, (STEP,), give_ups=1, deaths=1),
    ],
    ids=["circle, an end gives up", "neighbours, beside a collective", "both ways, all troubles"],
)
def test_larger_worlds(world: World) -> None:
    check(explore(world))


# ---- without its rules ----

NAIVE_SENDER: SenderTable = {
    (_S.START, _SE.BEGIN_HERE): (_S.INSIDE, (_F.CROSS,)),
    (_S.START, _SE.BEGIN_THERE): (_S.INSIDE, (_F.CROSS,)),
    (_S.INSIDE, _SE.APPLIED): (_S.SETTLING, ()),
    (_S.SETTLING, _SE.LAST_CROSSED): (_S.DONE, ()),
    (_S.INSIDE, _SE.LAST_CROSSED): (_S.CROSSED, ()),
    (_S.CROSSED, _SE.APPLIED): (_S.DONE, ()),
}
NAIVE_RECEIVER: ReceiverTable = {
    (_R.START, _RE.BEGIN): (_R.ENTERING, (_F.CROSS,)),
    (_R.ENTERING, _RE.ENTERED): (_R.INSIDE, ()),
    (_R.INSIDE, _RE.LAST_CROSSED): (_R.DONE, ()),
}
"""Both ends go into the library when they please, as inference does."""

WAITING_RECEIVER: ReceiverTable = {
    **{pair: step for pair, step in RECEIVER.items() if pair != (_R.HELD_OFF, _RE.FREED)},
    (_R.READY, _RE.ENTER_BUSY): (_R.HELD_OFF, (_F.WATCH,)),
    (_R.HELD_OFF, _RE.ENTER_FREE): (_R.ENTERING, (_F.CROSS,)),
}
"""A receiver waits for its gate, instead of sending the sender back."""

LATE_SENDER: SenderTable = {
    **SENDER,
    (_S.OFFERED, _SE.READY): (_S.ENTERING, (_F.SAY_ENTER,)),
    (_S.JOINING, _SE.CLAIMED): (_S.ENTERING, (_F.SAY_ENTER,)),
    (_S.HELD_OFF, _SE.FREE): (_S.ENTERING, (_F.SAY_ENTER,)),
    (_S.ENTERING, _SE.ENTERED): (_S.LOCKING, (_F.LOCK,)),
    (_S.LOCKING, _SE.LOCKED): (_S.INSIDE, (_F.CROSS,)),
}
"""A sender locks its gate when the receiver has entered, not before."""


def leaving_behind(event: SenderEvent) -> SenderTable:
    """A sender that ends its entering without dropping the group."""
    state, effects = SENDER[_S.ENTERING, event]
    kept = tuple(effect for effect in effects if effect is not _F.DISCARD)
    return {**SENDER, (_S.ENTERING, event): (state, kept)}


NAIVE = {"sender_table": NAIVE_SENDER, "receiver_table": NAIVE_RECEIVER, "told": False}

BROKEN = {
    "no handshake, beside inference": World(2, ((0, 1),), (STEP,), **NAIVE),  # type: ignore[arg-type]
    "no handshake, both ways": World(2, BOTH_WAYS, **NAIVE),  # type: ignore[arg-type]
    "each its own claim first, two ranks": World(2, BOTH_WAYS, ordered=False),
    "each its own claim first, three ranks": World(3, CIRCLE, ordered=False),
    "the receiver waits for its gate": World(2, ((0, 1),), (STEP,), receiver_table=WAITING_RECEIVER),
    "the sender locks late": World(2, ((0, 1),), (STEP,), sender_table=LATE_SENDER),
    "the receiver stays behind": World(2, ((0, 1),), give_ups=1, sender_table=leaving_behind(_SE.GIVE_UP)),
    "the receiver enters late": World(2, ((0, 1),), give_ups=1, sender_table=leaving_behind(_SE.REFUSED)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_without_a_rule_somebody_waits_for_ever(name: str) -> None:
    finding = explore(BROKEN[name])
    assert "waits" in finding.problem or "isn't free" in finding.problem, finding


def test_a_circle_is_found() -> None:
    """A receiver that calls the sender back before its gate is free."""
    restless: ReceiverTable = {**RECEIVER, (_R.READY, _RE.ENTER_BUSY): (_R.READY, (_F.SAY_BUSY, _F.SAY_FREE))}
    finding = explore(World(2, ((0, 1),), (STEP,), receiver_table=restless))
    assert finding.problem == "a circle", finding


# ---- the tables ----


NOT_IN_WORLDS = {
    (_S.START, _SE.BEGIN_EMPTY),
    # Memory is there at once.
    (_R.START, _RE.WITHDRAWN),
    (_R.START, _RE.GIVE_UP),
    # An operation ends at both ends, and fails by its peer alone.
    (_S.SETTLING, _SE.BROKEN),
    (_R.ENTERING, _RE.BROKEN),
    (_R.INSIDE_ASKED, _RE.BROKEN),
}


def test_every_pair_of_the_tables_comes_up_and_no_other() -> None:
    seen = {pair for name in WORLDS if WORLDS[name].ranks == 2 for pair in search(name).pairs}
    assert seen == (set(SENDER) | set(RECEIVER)) - NOT_IN_WORLDS


def test_an_undeclared_pair_raises() -> None:
    with pytest.raises(IllegalTransition, match="entered at a sender that is offered"):
        sender_step(_S.OFFERED, _SE.ENTERED)
    with pytest.raises(IllegalTransition, match="freed at a receiver that is ready"):
        receiver_step(_R.READY, _RE.FREED)
