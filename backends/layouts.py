"""What an engine does whose pipeline changes shape while it serves (PipeLive, sections 4 and 6).

A change takes layers from stages to other stages of the same instance. The worker calls, in this order:

    layout()                            what there is; the planner decides whether the target is feasible
    begin_layout(change)                BEGIN enters the command log
    resize_kv(capacity)                 `ResizableEngine`: room for both layouts' layers, if there is too little
    load_weights(id)                    in the background, at low priority
    start_kv_migration(id, ...)         in the background: all live slots, then patches
    layout_progress(id)...              until weights are loaded and little lags
    commit_layout(id, ...)              COMMIT enters the log; every stage switches
    resize_kv(capacity)                 what the new layout has room for

and `abort_layout(id)` at any time instead. Until COMMIT is in the log the instance is in the old layout and serves,
whatever fails; afterwards it comes to the new one, whatever fails but the engine itself. The engine aborts by itself at
the deadline of the change unless COMMIT is in the log, so that nobody's death leaves it halfway.

The sim engine and the real one pass `tests/contract/engine_layout_suite.py`.
"""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from meshift.backends.base import ResizableEngine
from meshift.kv_memory.layout import KvLayout
from meshift.schemas.layouts import CommitMode, LayoutFlags, LayoutRefusal, StageProgress, StagesInProgress


@dataclass(frozen=True, slots=True)
class Layout:
    """Which stage holds which layers."""

    layer_ranges: tuple[tuple[int, int], ...]
    """[start, end) of each stage, contiguous from 0 to the model's layers; a stage may be empty. As many as ranks were
    started for: stages neither come nor go, they get layers and lose them."""
    epoch: int
    """0 at the engine's start; one more with every commit."""
    layers_per_group: int
    """k: boundaries lie at multiples of it, the end of the model excepted."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What the planner must know of one stage, of each of its tensor ranks alike. Bytes."""

    budget: int | None
    """For layers' weights and KV together. None: unbounded (a CPU with enough memory)."""
    reserve: int
    """Of the budget, for neither: embeddings, head, activations."""
    layer_weights: int
    """Of one layer."""
    block: int
    """Of one page of one group of k layers, or of the model's last group, which may hold fewer: one unit."""


@dataclass(frozen=True, slots=True)
class LayoutEnd:
    """What became of a change."""

    change_id: str
    committed: bool
    """The instance is in its target; else it stayed as it was."""
    epoch: int
    """Afterwards."""
    refusal: LayoutRefusal | None = None
    """Why it didn't come about."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LayoutNow:
    """An instance's layout and what a change of it has to work with."""

    layout: Layout
    kv: KvLayout | None
    """The same as request moves see it; it replaces `EngineInfo.layout` from the commit on."""
    stages: tuple[StageMemory, ...]
    page_tokens: int
    capacity: int
    """Tokens; all stages have the same."""
    capacity_max: int
    """Tokens: the operator's bound, which no layout exceeds."""
    change_id: str | None = None
    """Of the change that is under way."""
    ended: tuple[LayoutEnd, ...] = ()
    """The newest ones, newest last; at least the last 16: a lost answer is asked for here."""


@dataclass(frozen=True, slots=True)
class LayoutChange:
    """One change, from the present layout."""

    change_id: str
    epoch: int
    """Of the layout that it was planned for: another one is refused as STALE."""
    target: tuple[tuple[int, int], ...]
    flags: LayoutFlags = field(default_factory=LayoutFlags)
    deadline_s: float = 120.0
    """From the begin to COMMIT in the log."""


@dataclass(frozen=True, slots=True)
class LayoutProgress(StagesInProgress):
    """How far a change is."""

    change_id: str
    stages: tuple[StageProgress, ...]
    """Only those that get layers, in order."""
    scheduled_tokens: int = 0
    """T_sched: grows with every token whose KV is written."""
    failure: str = ""
    """What broke; only `abort_layout` is left then."""


@dataclass(frozen=True, slots=True)
class LayoutCommitted:
    """The instance is in its new layout."""

    now: LayoutNow
    commit: CommitMode
    """As it was done: an engine may drain where it was asked to lag and can't."""
    stop_ns: tuple[int, ...]
    """Per stage: the longest time in which it could have stepped and was held back."""
    last_patch_tokens: int = 0
    """Slots of the last patches, sent while a stage was held back; the most of any pair."""
    last_patch_bytes: int = 0
    """Of all pairs together."""
    duration_ns: int = 0
    """From the call until all stages had switched."""


class LayoutRefused(Exception):
    """Not so, or not now. Nothing has changed by the call that raises it."""

    def __init__(self, message: str, refusal: LayoutRefusal) -> None:
        super().__init__(message)
        self.refusal = refusal


@runtime_checkable
class ReconfigurableEngine(ResizableEngine, Protocol):
    """An engine that changes its layout while it serves (`Capability.CHANGE_LAYOUT`). One change at a time; requests
    come, run, end, are cancelled and move at all times, but for moves during the commit. Every method may raise
    TimeoutError and ConnectionError: then what was asked for may or may not have been done, and `layout()` tells.

    While a change is under way `resize_kv` doesn't grow (its reason says so). Slots that requests take which move here
    are writes like any other: they reach the layers' destinations."""

    async def layout(self) -> LayoutNow:
        """What there is now, what is under way, and what has ended."""

    async def begin_layout(self, change: LayoutChange) -> None:
        """BEGIN enters the log. Again with the same change: nothing. Raises LayoutRefused: BUSY, STALE, INVALID,
        UNALIGNED, UNCHANGED, UNSUPPORTED (this engine can't do these flags), UNKNOWN (it ended before)."""

    async def load_weights(self, change_id: str) -> None:
        """Begin to load the weights of layers that stages get; returns at once. Not called with `no_async` or
        `restart`. Idempotent. Raises LayoutRefused: UNKNOWN, NO_MEMORY, BROKEN."""

    async def start_kv_migration(self, change_id: str, bytes_per_s: float | None) -> None:
        """Take memory for the KV of layers that stages get, at the capacity of now, and begin to copy: all live slots
        first, then what was written meanwhile, again and again until the commit. At most `bytes_per_s` from each
        sending rank; None: as fast as it goes. Returns at once. Not called with `no_patch` or `restart`. Idempotent.
        Raises LayoutRefused: UNKNOWN, NO_MEMORY, BROKEN."""

    async def layout_progress(self, change_id: str) -> LayoutProgress:
        """How far it is. Raises LayoutRefused (UNKNOWN) if it has ended: `layout()` says how."""

    async def commit_layout(self, change_id: str, commit: CommitMode, timeout_s: float) -> LayoutCommitted:
        """COMMIT enters the log; returns when all stages have switched. Whatever lags is sent on the way, and with
        `no_patch`, `no_async` and `restart` what these left out, which takes as long as it takes. Weights and KV of
        layers that left a stage are freed afterwards, in the background. No request may be frozen, and no room be
        reserved for a move, from before the call until it returns: BUSY otherwise.

        Raises LayoutRefused if COMMIT isn't in the log and the change is as it was before: UNKNOWN, BUSY, NOT_READY
        (weights are missing), UNSUPPORTED (this commit mode, of this change), BROKEN. With TimeoutError it may be in
        the log: then it completes, and `layout()` will tell."""

    async def abort_layout(self, change_id: str) -> None:
        """Undo what was begun: writers go quiet, then memory and weights of what was to be moved go; the layout and
        the requests are as they were (capacity stays; the caller restores it). Idempotent; a change that is committed,
        or whose COMMIT is in the log, is left alone; one that never began will be refused as UNKNOWN."""
