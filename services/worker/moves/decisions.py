"""When to copy on and when to stop the request: pure, from how far a move is."""

from dataclasses import dataclass

from meshift.schemas.moves import MoveMode


@dataclass(frozen=True, slots=True)
class Rules:
    """Of all moves of a worker (Llumnix, section 4.2)."""

    final_tokens: int
    """So few are sent with the request stopped."""
    stages_max: int
    """Rounds, the last one included; at least one is live."""
    outgrown_max: int = 3
    """Times that the request may outgrow its room between the reservation and the freeze."""
    restarts_max: int = 2
    """Preemptions that a move lives through."""


@dataclass(slots=True)
class Progress:
    """Of one move. Tokens unless said."""

    mode: MoveMode
    with_kv: bool = False
    """Its KV is copied; else it goes as state only."""
    sent: int = 0
    """[0, sent) is at the destination."""
    rounds: int = 0
    """Live ones that have been sent."""
    grown: int = 0
    """Tokens that came during the last one."""
    outgrown: int = 0
    restarts: int = 0

    def begin(self, has_kv: bool) -> None:
        """The source agrees, for the first time or after a preemption: nothing has been sent."""
        self.with_kv = has_kv and self.mode is not MoveMode.RECOMPUTE
        self.sent = self.rounds = self.grown = 0

    def round_sent(self, end: int, computed: int) -> None:
        """A live round went up to `end`, and there are `computed` now."""
        self.rounds += 1
        self.sent = end
        self.grown = max(0, computed - end)

    def slots_wanted(self, computed: int, growth_left: int, rules: Rules) -> int:
        """Room to ask for: what there is, and what may come until the request stops. Twice what came during the last
        round, since asking takes time too; and twice as much each time that it was too little, since `computed` may
        lag behind the engine."""
        if not self.with_kv:
            return 0
        headroom = max(rules.final_tokens, 2 * self.grown) << self.outgrown
        return computed + min(growth_left, headroom)

    def is_last(self, computed: int, rules: Rules) -> bool:
        """Whether the next round is the one with the request stopped."""
        if not self.with_kv or self.mode is MoveMode.BLOCKING:
            return True
        little = computed - self.sent <= rules.final_tokens
        return self.rounds >= 1 and (little or self.rounds >= rules.stages_max - 1)
