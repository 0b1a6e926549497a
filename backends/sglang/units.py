"""The units of an instance, from what its ranks say of theirs."""

from collections.abc import Sequence

from meshift.backends.sglang import wire
from meshift.schemas.memory import MemoryUnits


def units_of(ranks: Sequence[wire.KvUnits | None], tensor_ranks: int) -> MemoryUnits | None:
    """Of all ranks together, in rank order: stage by stage, and in each stage the tensor ranks, which hold the same
    groups. None without units."""
    known = [rank for rank in ranks if rank is not None]
    if not known:
        return None
    stages = [stage for stage in known[::tensor_ranks] if stage.groups]
    first, last = stages[0], stages[-1]
    return MemoryUnits(
        layers_per_group=first.layers_per_group,
        groups=sum(stage.groups for stage in stages),
        last_group_layers=last.last_group_layers,
        page_tokens=first.page_tokens,
        unit_bytes=first.unit_bytes,
        unit_waste_bytes=first.unit_waste_bytes,
        last_unit_waste_bytes=last.last_unit_waste_bytes,
        units=sum(rank.units for rank in known),
        committed=sum(rank.committed for rank in known),
        committed_bytes=sum(rank.committed * rank.unit_bytes for rank in known),
        waste_bytes=sum(rank.waste_bytes for rank in known),
    )
