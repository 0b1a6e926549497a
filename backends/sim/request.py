"""One request inside the simulated engine."""

import asyncio

from meshift.backends.base import MoveKey
from meshift.backends.sim.lifecycle import RequestEvent, RequestState, next_state
from meshift.backends.sim.tokens import Generation
from meshift.schemas.identity import RequestKey
from meshift.schemas.requests import Finish, FinishReason, Priority

_LENGTH = Finish(reason=FinishReason.LENGTH)
_CANCELLED = Finish(reason=FinishReason.CANCELLED)


class SimRequest:
    """Counts are in tokens. `computed` (with KV) and `generated` (in the whole output) are those of when it entered the
    decode batch while it is in there; `DecodeBatch` knows the present ones."""

    __slots__ = (
        "admitted_ns", "arrived_ns", "base", "cancelled", "computed", "copies", "emitted", "entry_step", "finish_step",
        "freeze_waiter", "generated", "generation", "key", "loss_ns", "lost_move", "move", "page_generation", "pages",
        "preempted_ns", "preemptions", "priority", "queued_ns", "sequence", "state",
    )  # fmt: skip

    def __init__(self, key: RequestKey, generation: Generation, priority: Priority) -> None:
        self.key = key
        self.generation = generation
        self.priority = priority
        self.state = RequestState.WAITING
        self.arrived_ns = 0
        self.sequence = 0
        """Order of arrival on this engine."""
        self.admitted_ns = 0
        self.queued_ns: int | None = None
        """From arrival to the prefill, between that and the first tokens; None if it was preempted before."""
        self.computed = 0
        self.generated = len(generation.tokens) - generation.prompt
        self.emitted = self.generated
        """Tokens of the output that the listener has."""
        self.pages = 0
        self.page_generation = 0
        """Grows when its pages are given up."""
        self.entry_step = 0
        self.finish_step = 0
        self.cancelled = False
        self.move: MoveKey | None = None
        """The move that takes it away."""
        self.copies = False
        """Whether that move copies KV."""
        self.lost_move: MoveKey | None = None
        """The move that its last preemption ended."""
        self.freeze_waiter: asyncio.Future[bool] | None = None
        self.preempted_ns: int | None = None
        self.preemptions = 0
        self.loss_ns = 0

    def enter(self, event: RequestEvent) -> None:
        """Change the state. Raises ImpossibleTransition."""
        self.state = next_state(self.state, event)

    @property
    def known(self) -> int:
        """Tokens of prompt and output: what a prefill computes."""
        return self.generation.prompt + self.generated

    def finish(self, cancelled: bool) -> Finish:
        """Its end, now."""
        stopped = None if cancelled else self.generation.stopped
        if self.preemptions == 0 and stopped is None:
            return _CANCELLED if cancelled else _LENGTH
        reason = FinishReason.LENGTH if stopped is None else FinishReason.STOP
        return Finish(
            reason=FinishReason.CANCELLED if cancelled else reason,
            matched_stop=stopped,
            preemptions=self.preemptions,
            preemption_loss_ns=self.loss_ns,
        )
