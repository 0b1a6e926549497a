"""Which layers go from which rank to which, and whether a target is one. Pure."""

from collections.abc import Sequence
from itertools import pairwise

from meshift.backends.layouts import Layout, LayoutChange, LayoutRefused
from meshift.backends.sglang.wire_layers import LayerPair
from meshift.schemas.layouts import LayoutRefusal

Ranges = Sequence[tuple[int, int]]


def layer_pairs(change_id: str, current: Ranges, target: Ranges, tensor_ranks: int) -> list[LayerPair]:
    """All pairs of ranks between which layers go, in order. A tensor rank's heads stay on its equals."""
    return [
        LayerPair(
            transfer_id=f"layers/{change_id}/{rank}/{source}-{destination}",
            source=source * tensor_ranks + rank,
            destination=destination * tensor_ranks + rank,
            start=max(here[0], there[0]),
            end=min(here[1], there[1]),
        )
        for source, here in enumerate(current)
        for destination, there in enumerate(target)
        if source != destination and max(here[0], there[0]) < min(here[1], there[1])
        for rank in range(tensor_ranks)
    ]


def check_target(change: LayoutChange, layout: Layout, layers: int) -> None:
    """Raises LayoutRefused unless the change leads from this layout to another one of this model."""
    target, k = change.target, layout.layers_per_group
    if change.epoch != layout.epoch:
        raise LayoutRefused(f"planned for epoch {change.epoch}, it is {layout.epoch}", LayoutRefusal.STALE)
    whole = len(target) == len(layout.layer_ranges) and target[0][0] == 0 and target[-1][1] == layers
    joined = all(before[1] == after[0] for before, after in pairwise(target))
    if not (whole and joined and all(start <= end for start, end in target)):
        raise LayoutRefused(
            f"{target} isn't {layers} layers on {len(layout.layer_ranges)} stages", LayoutRefusal.INVALID
        )
    if any(end % k and end != layers for _, end in target):
        raise LayoutRefused(f"{target} isn't at boundaries of {k} layers", LayoutRefusal.UNALIGNED)
    if target == layout.layer_ranges:
        raise LayoutRefused("that is the present layout", LayoutRefusal.UNCHANGED)
