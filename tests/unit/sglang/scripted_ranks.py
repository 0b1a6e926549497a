"""Ranks that answer as a script says, in the place of `RankInstance`."""

from collections.abc import Callable
from typing import Any

from meshift.backends.sglang import wire, wire_moves
from meshift.backends.sglang.questions import Questions
from meshift.kv_memory.layout import KvLayout
from meshift.schemas.base import pack_tokens

STATE = wire_moves.MovedState(
    version=wire_moves.STATE_VERSION, seed=7, cached_tokens=0, preemptions=0, preemption_loss_ns=0, waits_ns=None
)
LAYOUT = KvLayout(((0, 2), (2, 4)), ((0, 1),), 4, "float32", "w")
"""Of two stages."""

ADDRESS = wire_moves.TargetAddress(scheme="tcp", location="127.0.0.1:1", rank=0, token="t")
Script = Callable[[Any, int], list[wire.Answer]]


def common(rank: int, nonce: int) -> dict[str, Any]:
    return {"rank": rank, "nonce": nonce, "iteration": 3}


class ScriptedRanks:
    """Two ranks. `scripts` replaces their answers to a type of command; None: no answer."""

    def __init__(self) -> None:
        self.questions = Questions(2)
        self.sent: list[wire.Command] = []
        self.is_up = True
        self.scripts: dict[type, Script | None] = {}

    def kinds(self) -> list[str]:
        """What was sent, by name."""
        return [type(command).__name__ for command in self.sent]

    def send(self, command: wire.Command) -> None:
        self.sent.append(command)
        kind = type(command)
        script = self.scripts.get(kind, usual)
        for rank in range(2) if script is not None else ():
            assert script is not None
            for answer in script(command, rank):
                self.questions.note(answer)

    def refuse(self, kind: type, refusal: str) -> None:
        """Both ranks refuse such commands."""
        self.scripts[kind] = lambda command, rank: [
            wire_moves.Refused(**common(rank, command.nonce), refusal=refusal, message="scripted")
        ]


def usual(command: Any, rank: int) -> list[wire.Answer]:
    """What ranks say when all is well: a request with the tokens 1, 2, 3 and the output 4, 5."""
    if isinstance(command, wire_moves.Recall):
        return []
    fields = common(rank, command.nonce)
    match command:
        case wire_moves.BeginMove():
            return [wire_moves.Begun(**fields, tokens=pack_tokens([1, 2, 3, 4]), growth_max=9, generation=0)]
        case wire_moves.SendDelta():
            return [
                wire_moves.Gathered(**fields, start=command.start, end=4, byte_count=8),
                wire_moves.Sent(rank=rank, nonce=command.sent_nonce, error="", gather_ns=rank, transfer_ns=5),
            ]
        case wire_moves.Freeze():
            return [_frozen(command, fields), *_sent(command, rank)]
        case wire_moves.Reserve():
            slots = -(-command.slots // 4) * 4
            targets = [(part.pair, ADDRESS) for part in command.parts if part.rank == rank]
            return [wire_moves.ReservedAt(**fields, cached=0, slots=slots, targets=targets)]
        case wire_moves.HashReserved():
            return [wire_moves.Hashes(**fields, hashes=[wire_moves.PairHash(pair=rank, hash="0" * 31 + "1")])]
        case wire_moves.Quiesce():
            return [wire_moves.Quiet(rank=rank, nonce=command.nonce)]
        case wire.Commit():
            return [wire_moves.CommittedAt(**fields, runnable_ns=100 + rank)]
    return [wire_moves.Done(**fields)]


def _frozen(command: wire_moves.Freeze, fields: dict[str, Any]) -> wire.Answer:
    return wire_moves.FrozenAt(
        **fields,
        start=command.start,
        end=4 if command.copies else 0,
        byte_count=8,
        output=pack_tokens([4, 5]),
        state=STATE,
        hashes=[],
        frozen_ns=50,
    )


def _sent(command: wire_moves.Freeze, rank: int) -> list[wire.Answer]:
    if not command.copies:
        return []
    return [wire_moves.Sent(rank=rank, nonce=command.sent_nonce, error="", gather_ns=rank, transfer_ns=5)]
