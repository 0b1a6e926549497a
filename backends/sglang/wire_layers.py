"""What worker and ranks say about layers that move between the ranks of one instance; see `wire`.

Every rank answers a command with its `nonce`: `LayersRefused`, or what the command asks for. Answers that need time
come when it is done; until then the ranks go on with their stream.
"""

import msgspec

from meshift.backends.sglang.wire_moves import TargetAddress


class LayerPair(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Layers [start, end) that go from one rank to another of the same tensor rank."""

    transfer_id: str
    source: int
    destination: int
    start: int
    end: int


class LayerFacts(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a rank says of its layers at the start."""

    layer_bytes: int = 0
    """Of one layer's weights, the largest one's."""
    fixed_bytes: int = 0
    """Of weights outside the layers."""
    block_bytes: int = 1
    """Of one page of one group."""
    layers_per_group: int = 1
    obstacle: str = ""
    """Why layers can't move; empty if they can."""


# ---- commands ----


class BeginLayers(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="meshift.layers_begin"):
    """A change from the present ranges to `target`. It ends by itself after `deadline_s`, unless a commit is in the
    stream by then. `LayersDone`."""

    nonce: int
    change_id: str
    target: list[tuple[int, int]]
    """[start, end) of each stage."""
    pairs: list[LayerPair]
    deadline_s: float
    verify: bool
    """Whether both ends hash what was copied, once nothing is launched; costs time in the commit."""


class LoadLayers(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="meshift.layers_load"):
    """Begin to load the weights of layers that the rank gets. `LayersDone`."""

    nonce: int
    change_id: str


class OpenLayers(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="meshift.layers_open"):
    """Take memory for KV of layers that the rank gets, and receive. `LayersOpened`."""

    nonce: int
    change_id: str


class SendLayers(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="meshift.layers_send"):
    """Begin to copy KV: all live slots first, then what is written. `LayersDone`."""

    nonce: int
    change_id: str
    addresses: list[TargetAddress]
    """In the order of the change's pairs."""
    bytes_per_s: float | None


class AskLayers(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="meshift.layers_ask"):
    """How far is it? `LayersAt`."""

    nonce: int
    change_id: str


class DrainLayers(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="meshift.layers_drain"):
    """First half of a draining commit: launch nothing more, and say when nothing is launched: `LayersDone`."""

    nonce: int
    change_id: str


class FlushLayers(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="meshift.layers_flush"):
    """Send what lags, and say when all of it has arrived: `LayersDone`. While nothing is launched."""

    nonce: int
    change_id: str


class SwitchLayers(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="meshift.layers_switch"):
    """Second half of a draining commit: switch, or, unless `goes`, go on as before. `LayersSwitched`, or `LayersDone`;
    and to `settled_nonce`, `LayersDone` when memory is free."""

    nonce: int
    settled_nonce: int
    change_id: str
    goes: bool


class CommitLayers(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="meshift.layers_commit"):
    """The lagging commit: each rank switches before the iteration that follows. As `SwitchLayers`."""

    nonce: int
    settled_nonce: int
    change_id: str


class AbortLayers(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="meshift.layers_abort"):
    """Undo what was begun. `LayersDone`, when its memory is free."""

    nonce: int
    change_id: str


class ExpireLayers(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="meshift.layers_expire"):
    """The leading rank's: the deadline has passed. All ranks undo it, unless a commit came before this."""

    change_id: str


# ---- reports ----


class LayersRefused(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="layers_refused"):
    """Nothing was done. `refusal` is one of `schemas.layouts.LayoutRefusal`."""

    rank: int
    nonce: int
    iteration: int
    refusal: str
    message: str


class LayersDone(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="layers_done"):
    """It is so. `problem`: why it isn't quite (a transfer broke, say)."""

    rank: int
    nonce: int
    iteration: int
    problem: str = ""
    tokens: int = 0
    """Of a flush: slots that lagged; the most of any pair."""
    byte_count: int = 0
    """Of a flush: of all pairs of this rank."""


class LayersOpened(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="layers_opened"):
    """(index of a pair, address) of the pairs that this rank receives."""

    rank: int
    nonce: int
    iteration: int
    addresses: list[tuple[int, TargetAddress]]


class LayersAt(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="layers_at"):
    """How far a rank is."""

    rank: int
    nonce: int
    iteration: int
    scheduled_tokens: int
    """Whose KV was written since the rank's start: `T_sched`."""
    layers: int
    """That it gets."""
    layers_loaded: int
    applied_tokens: int
    """`T_applied`, the least of its sources'; -1: the first round isn't applied yet."""
    byte_count: int
    rounds: int
    problem: str


class LayersSwitched(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="layers_switched"):
    """The rank has its new layers."""

    rank: int
    nonce: int
    iteration: int
    switched_at: int
    """The iteration before which it switched; the same on all ranks."""
    stop_ns: int
    """How long it could have stepped and was held back."""
    switch_ns: int
    """Of that, what the switch itself took."""
    tokens: int
    """Slots that lagged at the end; the most of any pair."""
    byte_count: int
    hashes: list[tuple[int, str]] = []
    """(index of a pair, hash of its live slots), if it is to be verified and nothing was launched."""


class LayersExpired(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="layers_expired"):
    """The rank has undone a change by itself; its memory is free."""

    rank: int
    change_id: str


LayerCommand = (
    BeginLayers
    | LoadLayers
    | OpenLayers
    | SendLayers
    | AskLayers
    | DrainLayers
    | FlushLayers
    | SwitchLayers
    | CommitLayers
    | AbortLayers
    | ExpireLayers
)
LayerAnswer = LayersRefused | LayersDone | LayersOpened | LayersAt | LayersSwitched
