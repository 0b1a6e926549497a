"""The shared KV transfer as decisions: its states, watermarks, generations, and when little enough is left.

Nothing here does I/O, reads a clock or knows what a request or a layer move is; `endpoint.py` and
`live_copy.py` carry these decisions out, and the protocols of both kinds of move stand above.

    COPYING --caught up--> CONVERGED --freeze--> CUTOVER --commit--> DONE
       ^                       |                    |
       +------ restart --------+      abort, from any of the three: ABORTED

A transfer copies one rectangle from one instance to another (or from stages to stages of the same one) as a
set of pair transfers, one per source rank and destination rank that share cells of it. Two figures say how
far it is, in tokens: `T_scheduled`, what the writer has written, and `T_applied` of a pair, the watermark
of the last patch that its receiver applied. What is left is `T_scheduled` minus the least `T_applied`: a
slot that is rewritten again and again raises both, so it can't keep a transfer behind for ever (PipeLive,
section 5).

A generation is one life of the source's pages. When it changes (the request was retracted, its slots were
reused) what was copied counts for nothing and the transfer restarts, a bounded number of times."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from meshift.kv_memory.rectangle import Rectangle, cut
from meshift.kv_memory.transport.base import Patch


class TransferState(StrEnum):
    """Where a transfer is."""

    COPYING = "copying"
    """Live rounds; the writer goes on."""
    CONVERGED = "converged"
    """Little is left; live rounds may go on until the freeze."""
    CUTOVER = "cutover"
    """The writer has stopped; the last patches are on their way."""
    DONE = "done"
    """The destination owns it."""
    ABORTED = "aborted"
    """The source owns it, as before."""


class TransferEvent(StrEnum):
    """What can happen to it."""

    ROUND = "round"
    """A live round was applied and much is left."""
    CAUGHT_UP = "caught_up"
    """A live round was applied and little is left, or no further round is allowed."""
    RESTART = "restart"
    """The source's pages changed."""
    FREEZE = "freeze"
    """The writer has stopped."""
    COMMIT = "commit"
    """The owner changes, all being applied."""
    ABORT = "abort"


_S, _E = TransferState, TransferEvent

TRANSITIONS: dict[tuple[TransferState, TransferEvent], TransferState] = {
    (_S.COPYING, _E.ROUND): _S.COPYING,
    (_S.COPYING, _E.CAUGHT_UP): _S.CONVERGED,
    (_S.COPYING, _E.RESTART): _S.COPYING,
    (_S.COPYING, _E.ABORT): _S.ABORTED,
    (_S.CONVERGED, _E.ROUND): _S.CONVERGED,
    (_S.CONVERGED, _E.CAUGHT_UP): _S.CONVERGED,
    (_S.CONVERGED, _E.RESTART): _S.COPYING,
    (_S.CONVERGED, _E.FREEZE): _S.CUTOVER,
    (_S.CONVERGED, _E.ABORT): _S.ABORTED,
    (_S.CUTOVER, _E.COMMIT): _S.DONE,
    (_S.CUTOVER, _E.ABORT): _S.ABORTED,
    (_S.ABORTED, _E.ABORT): _S.ABORTED,
}
"""All that may happen; any other pair raises."""


class TransferError(Exception):
    """What was asked is not possible now; the transfer is as it was."""


class IllegalTransition(TransferError):
    """The pair of state and event is not declared in `TRANSITIONS`."""


class NotApplied(TransferError):
    """A commit before every pair has applied everything."""


class PatchRefused(TransferError):
    """The receiver does not take this patch: of another transfer, outside the rectangle, or too old."""


def next_state(state: TransferState, event: TransferEvent) -> TransferState:
    """The state after the event. Raises IllegalTransition for an undeclared pair."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"{event.value} while {state.value}") from None


@dataclass(frozen=True, slots=True)
class Pair:
    """One pair transfer: what `source` rank sends to `destination` rank."""

    transfer_id: str
    """Of the pair: the whole transfer's, and the two ranks."""
    source: int
    destination: int
    rectangle: Rectangle


def plan_pairs(
    transfer_id: str, whole: Rectangle, sources: Sequence[Rectangle], destinations: Sequence[Rectangle]
) -> list[Pair]:
    """Cut `whole` by owner on both sides. Both ends compute the same pairs, in the same order.

    Raises ValueError if a side's ranks don't cover `whole` exactly once."""
    return [
        Pair(f"{transfer_id}/{source}-{destination}", source, destination, piece)
        for source, destination, piece in cut(whole, sources, destinations)
    ]


@dataclass(frozen=True, slots=True)
class ConvergenceRule:
    """When to stop copying live. A blocking copy has `rounds_min=0, rounds_max=0`."""

    tokens_left_max: int
    """Little is left: Llumnix's last stage, PipeLive's tau."""
    rounds_min: int = 1
    """Live rounds that there are in any case."""
    rounds_max: int | None = None
    """Live rounds after which the rest goes frozen, whatever it is; None leaves that to a deadline above."""
    restarts_max: int = 1
    """Changes of generation that it lives through."""

    def converged(self, rounds: int, tokens_left: int) -> bool:
        """Whether the writer may be frozen after that many live rounds."""
        if rounds < self.rounds_min:
            return False
        exhausted = self.rounds_max is not None and rounds >= self.rounds_max
        return exhausted or tokens_left <= self.tokens_left_max


class Transfer:
    """The whole of one transfer, at the end that drives it."""

    def __init__(self, pairs: Sequence[Pair], rule: ConvergenceRule) -> None:
        self.pairs = tuple(pairs)
        self.rule = rule
        self.state = TransferState.COPYING
        self.rounds = 0
        """Live rounds of this generation."""
        self.restarts = 0
        self.scheduled = 0
        """`T_scheduled`."""
        self.abort_reason = ""
        self._applied = [0] * len(self.pairs)
        if rule.rounds_min == rule.rounds_max == 0:
            self._advance(TransferEvent.CAUGHT_UP)

    @property
    def applied(self) -> int:
        """The least `T_applied`; `scheduled` if there is nothing to copy."""
        return min(self._applied, default=self.scheduled)

    @property
    def tokens_left(self) -> int:
        """How far the slowest pair is behind the writer."""
        return self.scheduled - self.applied

    def observe_written(self, scheduled: int) -> None:
        """The writer has written that many tokens. Raises ValueError if it falls without a restart."""
        if scheduled < self.scheduled:
            raise ValueError(f"T_scheduled falls from {self.scheduled} to {scheduled}")
        self.scheduled = scheduled

    def observe_applied(self, pair: int, watermark: int) -> None:
        """The receiver of `pairs[pair]` has applied that watermark, in this generation. Answers may come
        late: a lower one changes nothing, and one above `T_scheduled` raises that, since it must have been
        written."""
        self._applied[pair] = max(self._applied[pair], watermark)
        self.scheduled = max(self.scheduled, watermark)

    def finish_round(self) -> TransferState:
        """A live round was applied by all pairs; decide whether it was enough."""
        enough = self.rule.converged(self.rounds + 1, self.tokens_left)
        self._advance(TransferEvent.CAUGHT_UP if enough else TransferEvent.ROUND)
        self.rounds += 1
        return self.state

    def restart(self) -> TransferState:
        """The generation changed: nothing that was copied counts. Aborts after `restarts_max`."""
        if self.restarts >= self.rule.restarts_max:
            return self.abort(f"the source's pages changed {self.restarts + 1} times")
        self._advance(TransferEvent.RESTART)
        self.restarts += 1
        self.rounds = 0
        self.scheduled = 0
        self._applied = [0] * len(self.pairs)
        return self.state

    def freeze(self, scheduled: int) -> None:
        """The writer has stopped, at that many tokens."""
        state = next_state(self.state, TransferEvent.FREEZE)
        self.observe_written(scheduled)
        self.state = state

    def commit(self) -> None:
        """The destination owns it. Raises NotApplied if a pair is behind."""
        state = next_state(self.state, TransferEvent.COMMIT)
        if self.tokens_left:
            behind = [p.transfer_id for p, a in zip(self.pairs, self._applied, strict=True) if a < self.scheduled]
            raise NotApplied(f"{', '.join(behind)} have not applied {self.scheduled}")
        self.state = state

    def abort(self, reason: str) -> TransferState:
        """The source keeps it. Idempotent: the first reason stays. Raises IllegalTransition once it is
        done."""
        if self.state is not TransferState.ABORTED:
            self._advance(TransferEvent.ABORT)
            self.abort_reason = reason
        return self.state

    def _advance(self, event: TransferEvent) -> None:
        self.state = next_state(self.state, event)


class Coverage:
    """Which tokens have been applied: a set of integers as ascending, disjoint, not touching ranges."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        """Cover [start, end)."""
        if start >= end:
            return
        low, high = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if low < high:
            start, end = min(start, self._starts[low]), max(end, self._ends[high - 1])
        self._starts[low:high] = [start]
        self._ends[low:high] = [end]

    def covers(self, start: int, end: int) -> bool:
        """Whether all of [start, end) is covered."""
        index = bisect_right(self._starts, start) - 1
        return start >= end or (index >= 0 and self._ends[index] >= end)

    def clear(self) -> None:
        """Cover nothing."""
        self._starts.clear()
        self._ends.clear()


class Reception:
    """What the receiving rank of one pair accepts, and how far it is. `accept`, then write, then `record`."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.applied = 0
        """`T_applied` in this generation."""
        self.generation = -1
        """The newest seen; -1 before the first patch."""
        self._coverage = Coverage()

    def accept(self, patch: Patch) -> None:
        """The patch may be written. With a newer generation, older ones count for nothing from now on.

        Raises PatchRefused, and changes nothing then."""
        if patch.transfer_id != self.pair.transfer_id:
            raise PatchRefused(f"patch of transfer {patch.transfer_id}, not {self.pair.transfer_id}")
        if not patch.rectangle.empty and patch.rectangle.intersect(self.pair.rectangle) != patch.rectangle:
            raise PatchRefused(f"{patch.rectangle} is not within {self.pair.rectangle}")
        if patch.generation < self.generation:
            raise PatchRefused(f"generation {patch.generation} is older than {self.generation}")
        if patch.generation == self.generation and patch.watermark < self.applied:
            raise PatchRefused(f"watermark {patch.watermark} is older than {self.applied}")
        if patch.generation > self.generation:
            self.generation = patch.generation
            self.applied = 0
            self._coverage.clear()

    def record(self, patch: Patch) -> None:
        """The patch is written."""
        self.applied = patch.watermark
        rectangle, whole = patch.rectangle, self.pair.rectangle
        if (rectangle.layers, rectangle.heads) == (whole.layers, whole.heads):
            self._coverage.add(rectangle.token_start, rectangle.token_end)

    def covers(self, start: int, end: int) -> bool:
        """Whether tokens [start, end) were written in this generation, by patches of all layers and heads."""
        return self._coverage.covers(start, end)
