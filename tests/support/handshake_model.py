"""Every interleaving of the two-phase handshake in a small world, over a library in which an operation holds up all
later ones of its rank until its peers have entered it, too (as NCCL's do on a device).

`World` describes one, `Explorer` tells what can happen in it; `handshake_search.py` walks through all of it. Ends run
the tables of `meshift.kv_memory.transport.distributed.table`, or others that a test gives."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from meshift.kv_memory.transport.distributed.table import (
    RECEIVER,
    RECEIVER_FINAL,
    SENDER,
    SENDER_FINAL,
    Effect,
    ReceiverEvent,
    ReceiverState,
    ReceiverTable,
    SenderEvent,
    SenderState,
    SenderTable,
    receiver_step,
    sender_step,
)

_S, _SE, _R, _RE, _F = SenderState, SenderEvent, ReceiverState, ReceiverEvent, Effect

TO_SENDER = {
    _F.SAY_READY: _SE.READY,
    _F.SAY_ENTERED: _SE.ENTERED,
    _F.SAY_BUSY: _SE.BUSY,
    _F.SAY_FREE: _SE.FREE,
    _F.SAY_REFUSE: _SE.REFUSED,
}
"""What a receiver says, as its sender hears it."""

Pair = tuple[SenderState, SenderEvent] | tuple[ReceiverState, ReceiverEvent]

ANNOUNCE, ENTER, WITHDRAW = "announce", "enter", "withdraw"
TO_RECEIVER = {_F.SAY_ANNOUNCE: ANNOUNCE, _F.SAY_ENTER: ENTER, _F.SAY_WITHDRAW: WITHDRAW}


@dataclass(frozen=True, slots=True)
class Operation:
    """Of inference: all its ranks take part."""

    name: str
    ranks: tuple[int, ...]
    waits: bool = True
    """Whether a rank waits for its end, or goes on when it is issued (as an `isend`)."""


@dataclass(frozen=True, slots=True)
class World:
    """What is to happen."""

    ranks: int
    exchanges: tuple[tuple[int, int], ...]
    """(sender, receiver)."""
    inference: tuple[Operation, ...] = ()
    """Each rank runs those that it takes part in, in this order."""
    pieces: int = 1
    give_ups: int = 0
    """How many ends may give up, at any time."""
    deaths: int = 0
    """How many ranks may die, at any time."""
    sender_table: SenderTable = field(default_factory=lambda: SENDER)
    receiver_table: ReceiverTable = field(default_factory=lambda: RECEIVER)
    ordered: bool = True
    """Claims are taken in the order of the ranks."""
    told: bool = True
    """A receiver begins when the sender tells it; otherwise by itself."""

    def program(self, rank: int) -> list[Operation]:
        """Of that rank."""
        return [operation for operation in self.inference if rank in operation.ranks]


class Rank(NamedTuple):
    """One, at a moment."""

    alive: bool = True
    issued: int = 0
    """Operations of its program."""
    blocked: str = ""
    """The operation that it waits for."""
    at_gate: bool = False
    inside: int = 0
    """Operations of inference in its gate."""
    lock: int = -1
    """The exchange that has locked its gate."""
    claims: tuple[int, ...] = ()
    claimed: bool = False
    """The first of them knows that it is."""
    library: tuple[tuple[str, int], ...] = ()
    """Operations, in the order in which they were issued: ("name", -1) of inference, ("", number) of exchanges."""


class Exchange(NamedTuple):
    """One, at a moment."""

    sender: SenderState = _S.START
    receiver: ReceiverState = _R.START
    sent: int = 0
    received: int = 0
    """Pieces."""
    to_receiver: tuple[str, ...] = ()
    to_sender: tuple[SenderEvent, ...] = ()
    sender_job: str = ""
    receiver_job: str = ""
    """Empty, "entering" (a receiver's, not in the library yet), "running", "crossed" or "broken"."""
    discarded: bool = False
    """An end has dropped the group."""


class State(NamedTuple):
    """All of it, at a moment."""

    ranks: tuple[Rank, ...]
    exchanges: tuple[Exchange, ...]
    give_ups: int
    deaths: int


class Builder:
    """The next state, in the making."""

    def __init__(self, world: World, pairs: set[Pair], state: State) -> None:
        self.world = world
        self.pairs = pairs
        self.ranks = list(state.ranks)
        self.exchanges = list(state.exchanges)
        self.give_ups = state.give_ups
        self.deaths = state.deaths

    def done(self) -> State:
        return State(tuple(self.ranks), tuple(self.exchanges), self.give_ups, self.deaths)

    def rank(self, index: int, **changes: object) -> None:
        self.ranks[index] = self.ranks[index]._replace(**changes)  # type: ignore[arg-type]

    def exchange(self, index: int, **changes: object) -> None:
        self.exchanges[index] = self.exchanges[index]._replace(**changes)  # type: ignore[arg-type]

    # ---- events ----

    def at_sender(self, index: int, event: SenderEvent) -> None:
        self.pairs.add((self.exchanges[index].sender, event))
        state, effects = sender_step(self.exchanges[index].sender, event, self.world.sender_table)
        self.exchange(index, sender=state)
        sender, receiver = self.world.exchanges[index]
        for effect in effects:
            if effect in TO_RECEIVER:
                if self.ranks[receiver].alive:
                    heard = self.exchanges[index].to_receiver
                    self.exchange(index, to_receiver=(*heard, TO_RECEIVER[effect]))
            elif effect is _F.CROSS:
                self.exchange(index, sender_job="running")
                self.rank(sender, library=(*self.ranks[sender].library, ("", index)))
            else:
                self.common(index, sender, effect)

    def at_receiver(self, index: int, event: ReceiverEvent) -> None:
        self.pairs.add((self.exchanges[index].receiver, event))
        state, effects = receiver_step(self.exchanges[index].receiver, event, self.world.receiver_table)
        self.exchange(index, receiver=state)
        receiver = self.world.exchanges[index][1]
        for effect in effects:
            if effect in TO_SENDER:
                self.say_to_sender(index, TO_SENDER[effect])
            elif effect is _F.CROSS:
                self.exchange(index, receiver_job="entering")
            else:
                self.common(index, receiver, effect)
        if state is _R.DONE:
            self.say_to_sender(index, _SE.APPLIED)

    def say_to_sender(self, index: int, event: SenderEvent) -> None:
        if self.ranks[self.world.exchanges[index][0]].alive:
            self.exchange(index, to_sender=(*self.exchanges[index].to_sender, event))

    def common(self, index: int, rank: int, effect: Effect) -> None:
        here = self.ranks[rank]
        if effect is _F.CLAIM:
            self.rank(rank, claims=(*here.claims, index))
        elif effect is _F.UNCLAIM and index in here.claims:
            first = here.claims[0] == index
            self.rank(rank, claims=tuple(c for c in here.claims if c != index), claimed=here.claimed and not first)
        elif effect is _F.UNLOCK and here.lock == index:
            self.rank(rank, lock=-1)
        elif effect is _F.DISCARD:
            self.exchange(index, discarded=True)

    def hear(self, index: int) -> None:
        """The receiver hears the next message."""
        exchange = self.exchanges[index]
        message, rest = exchange.to_receiver[0], exchange.to_receiver[1:]
        self.exchange(index, to_receiver=rest)
        receiver = self.world.exchanges[index][1]
        if exchange.receiver in RECEIVER_FINAL:
            if message == ENTER:
                self.say_to_sender(index, _SE.REFUSED)
        elif message == ANNOUNCE:
            self.at_receiver(index, _RE.BEGIN)
        elif message == WITHDRAW:
            self.at_receiver(index, _RE.WITHDRAWN)
        elif free(self.ranks[receiver]) and exchange.receiver is _R.READY:
            self.rank(receiver, lock=index)
            self.at_receiver(index, _RE.ENTER_FREE)
        else:
            self.at_receiver(index, _RE.ENTER_BUSY)


def free(rank: Rank) -> bool:
    """Whether an exchange may lock its gate."""
    return rank.lock < 0 and not rank.inside and not rank.at_gate


Step = tuple[str, State]


class Explorer:
    """All that can happen."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.pairs: set[Pair] = set()
        self.programs = [world.program(rank) for rank in range(world.ranks)]

    def start(self) -> State:
        ranks = tuple(Rank() for _ in range(self.world.ranks))
        exchanges = tuple(Exchange() for _ in self.world.exchanges)
        return State(ranks, exchanges, self.world.give_ups, self.world.deaths)

    def steps(self, state: State) -> Iterator[Step]:
        """What happens by itself from there."""
        for rank in range(self.world.ranks):
            if state.ranks[rank].alive:
                yield from self.of_rank(state, rank)
        for index, (sender, receiver) in enumerate(self.world.exchanges):
            if state.ranks[sender].alive:
                yield from self.of_sender(state, index, sender, receiver)
            if state.ranks[receiver].alive:
                yield from self.of_receiver(state, index, sender, receiver)

    def troubles(self, state: State) -> Iterator[Step]:
        """What may happen besides."""
        if state.deaths:
            for rank in range(self.world.ranks):
                if state.ranks[rank].alive:
                    yield f"rank {rank} dies", self.die(state, rank)
        if state.give_ups:
            for index, (sender, receiver) in enumerate(self.world.exchanges):
                yield from self.give_up(state, index, sender, receiver)

    # ---- inference, and the library ----

    def of_rank(self, state: State, rank: int) -> Iterator[Step]:
        here = state.ranks[rank]
        if here.issued < len(self.programs[rank]) and not here.blocked:
            yield from self.infer(state, rank, self.programs[rank][here.issued])
        if here.claims and not here.claimed:
            build = Builder(self.world, self.pairs, state)
            build.rank(rank, claimed=True)
            index = here.claims[0]
            if self.world.exchanges[index][0] == rank:
                build.at_sender(index, _SE.CLAIMED)
            else:
                build.at_receiver(index, _RE.CLAIMED)
            yield f"rank {rank}: the claim is exchange {index}'s", build.done()
        if here.library:
            yield from self.head(state, rank, *here.library[0])

    def infer(self, state: State, rank: int, operation: Operation) -> Iterator[Step]:
        here, build = state.ranks[rank], Builder(self.world, self.pairs, state)
        if here.lock < 0:
            build.rank(
                rank,
                issued=here.issued + 1,
                at_gate=False,
                inside=here.inside + 1,
                blocked=operation.name if operation.waits else "",
                library=(*here.library, (operation.name, -1)),
            )
            yield f"rank {rank}: {operation.name}", build.done()
        elif not here.at_gate:
            build.rank(rank, at_gate=True)
            yield f"rank {rank}: {operation.name} waits at the gate", build.done()

    def head(self, state: State, rank: int, name: str, index: int) -> Iterator[Step]:
        """The first operation of a rank's ends, or fails."""
        members = self.world.exchanges[index] if index >= 0 else self.members(name)
        entered = [member for member in members if state.ranks[member].library[:1] == ((name, index),)]
        lost = any(not state.ranks[member].alive for member in members)
        broken = lost or (index >= 0 and state.exchanges[index].discarded)
        if len(entered) == len(members) and min(members) == rank:
            yield f"{name or index} completes", self.end(state, name, index, members, "crossed")
        elif broken:
            yield f"{name or index} fails at rank {rank}", self.end(state, name, index, (rank,), "broken")

    def members(self, name: str) -> tuple[int, ...]:
        return next(operation.ranks for operation in self.world.inference if operation.name == name)

    def end(self, state: State, name: str, index: int, ranks: tuple[int, ...], how: str) -> State:
        build = Builder(self.world, self.pairs, state)
        for rank in ranks:
            here = build.ranks[rank]
            build.rank(rank, library=here.library[1:])
            if index < 0:
                blocked = "" if here.blocked == name else here.blocked
                build.rank(rank, inside=here.inside - 1, blocked=blocked)
            elif self.world.exchanges[index][0] == rank:
                build.exchange(index, sender_job=how)
            else:
                build.exchange(index, receiver_job=how)
        return build.done()

    # ---- exchanges ----

    def of_sender(self, state: State, index: int, sender: int, receiver: int) -> Iterator[Step]:
        exchange, here = state.exchanges[index], state.ranks[sender]
        build = Builder(self.world, self.pairs, state)
        if exchange.sender is _S.START:
            first = sender < receiver or not self.world.ordered
            build.at_sender(index, _SE.BEGIN_HERE if first else _SE.BEGIN_THERE)
            yield f"exchange {index} begins", build.done()
        elif exchange.sender is _S.LOCKING and free(here):
            build.rank(sender, lock=index)
            build.at_sender(index, _SE.LOCKED)
            yield f"exchange {index}: the sender locks", build.done()
        elif exchange.sender_job in ("crossed", "broken"):
            last = exchange.sent + 1 == self.world.pieces
            event = _SE.LAST_CROSSED if last else _SE.PIECE_CROSSED
            build.exchange(index, sender_job="", sent=exchange.sent + 1)
            build.at_sender(index, event if exchange.sender_job == "crossed" else _SE.BROKEN)
            yield f"exchange {index}: the sender is through", build.done()
        if exchange.to_sender:
            yield self.hear_receiver(state, index)
        elif not state.ranks[receiver].alive and exchange.sender not in SENDER_FINAL | {_S.START, _S.LEAVING}:
            lost = Builder(self.world, self.pairs, state)
            lost.at_sender(index, _SE.GIVE_UP)
            yield f"exchange {index}: the sender loses the receiver", lost.done()

    def hear_receiver(self, state: State, index: int) -> Step:
        build, exchange = Builder(self.world, self.pairs, state), state.exchanges[index]
        event = exchange.to_sender[0]
        build.exchange(index, to_sender=exchange.to_sender[1:])
        if exchange.sender not in SENDER_FINAL:
            build.at_sender(index, event)
        return f"exchange {index}: the sender hears {event.value}", build.done()

    def of_receiver(self, state: State, index: int, sender: int, receiver: int) -> Iterator[Step]:
        exchange, here = state.exchanges[index], state.ranks[receiver]
        build = Builder(self.world, self.pairs, state)
        if exchange.receiver is _R.START and not self.world.told:
            build.at_receiver(index, _RE.BEGIN)
            yield f"exchange {index}: the receiver begins", build.done()
        elif exchange.receiver is _R.HELD_OFF and free(here):
            if (_R.HELD_OFF, _RE.FREED) in self.world.receiver_table:
                build.at_receiver(index, _RE.FREED)
            else:
                build.rank(receiver, lock=index)
                build.at_receiver(index, _RE.ENTER_FREE)
            yield f"exchange {index}: the receiver's gate is free", build.done()
        elif exchange.receiver_job == "entering":
            build.exchange(index, receiver_job="running")
            build.rank(receiver, library=(*here.library, ("", index)))
            build.at_receiver(index, _RE.ENTERED)
            yield f"exchange {index}: the receiver enters", build.done()
        elif exchange.receiver_job in ("crossed", "broken"):
            last = exchange.received + 1 == self.world.pieces
            event = _RE.LAST_CROSSED if last else _RE.PIECE_CROSSED
            build.exchange(index, receiver_job="", received=exchange.received + 1)
            build.at_receiver(index, event if exchange.receiver_job == "crossed" else _RE.BROKEN)
            yield f"exchange {index}: the receiver is through", build.done()
        if exchange.to_receiver:
            heard = Builder(self.world, self.pairs, state)
            heard.hear(index)
            yield f"exchange {index}: the receiver hears {exchange.to_receiver[0]}", heard.done()
        elif not state.ranks[sender].alive and exchange.receiver not in RECEIVER_FINAL | {_R.START, _R.LEAVING}:
            lost = Builder(self.world, self.pairs, state)
            lost.at_receiver(index, _RE.WITHDRAWN)
            yield f"exchange {index}: the receiver loses the sender", lost.done()

    # ---- troubles ----

    def give_up(self, state: State, index: int, sender: int, receiver: int) -> Iterator[Step]:
        exchange = state.exchanges[index]
        if state.ranks[sender].alive and exchange.sender not in SENDER_FINAL | {_S.START}:
            build = Builder(self.world, self.pairs, state)
            build.give_ups -= 1
            build.at_sender(index, _SE.GIVE_UP)
            yield f"exchange {index}: the sender gives up", build.done()
        if state.ranks[receiver].alive and exchange.receiver not in RECEIVER_FINAL | {_R.START}:
            build = Builder(self.world, self.pairs, state)
            build.give_ups -= 1
            build.at_receiver(index, _RE.GIVE_UP)
            yield f"exchange {index}: the receiver gives up", build.done()

    def die(self, state: State, rank: int) -> State:
        build = Builder(self.world, self.pairs, state)
        build.deaths -= 1
        build.ranks[rank] = Rank(alive=False)
        for index, (sender, receiver) in enumerate(self.world.exchanges):
            # What it said may still arrive; what is said to it is lost.
            if rank == sender:
                build.exchange(index, to_sender=(), sender_job="")
            elif rank == receiver:
                build.exchange(index, to_receiver=(), receiver_job="")
        return build.done()

    def unclean(self, state: State) -> str:
        """What is wrong with this as an end; empty if nothing is."""
        for number, here in enumerate(state.ranks):
            if not here.alive:
                continue
            if here.issued < len(self.programs[number]) or here.inside or here.blocked or here.at_gate:
                return f"inference of rank {number} waits: {here}"
            if here.lock >= 0 or here.claims or here.library:
                return f"rank {number} isn't free: {here}"
        for index, (sender, receiver) in enumerate(self.world.exchanges):
            exchange = state.exchanges[index]
            if state.ranks[sender].alive and exchange.sender not in SENDER_FINAL:
                return f"the sender of exchange {index} waits: {exchange}"
            if state.ranks[receiver].alive and exchange.receiver not in RECEIVER_FINAL | {_R.START}:
                return f"the receiver of exchange {index} waits: {exchange}"
            calm = self.world.give_ups == self.world.deaths == 0
            if calm and (exchange.sender, exchange.receiver) != (_S.DONE, _R.DONE):
                return f"exchange {index} isn't done: {exchange}"
        return ""
