"""An instance's units, from those of its ranks."""

from typing import Any

from meshift.backends.sglang import wire
from meshift.backends.sglang.units import units_of
from meshift.schemas.memory import MemoryUnits


def rank(**changes: Any) -> wire.KvUnits:
    fields = {
        "layers_per_group": 4, "groups": 5, "last_group_layers": 4, "page_tokens": 16, "unit_bytes": 100,
        "unit_waste_bytes": 1, "last_unit_waste_bytes": 1, "units": 50, "committed": 20, "waste_bytes": 20,
    }  # fmt: skip
    return wire.KvUnits(**fields | changes)


def test_two_stages_of_two_tensor_ranks() -> None:
    last = rank(groups=3, last_group_layers=2, last_unit_waste_bytes=51, units=30, committed=12, waste_bytes=212)
    assert units_of([rank(), rank(), last, last], 2) == MemoryUnits(
        layers_per_group=4,
        groups=8,
        last_group_layers=2,
        page_tokens=16,
        unit_bytes=100,
        unit_waste_bytes=1,
        last_unit_waste_bytes=51,
        units=160,
        committed=64,
        committed_bytes=6400,
        waste_bytes=464,
    )


def test_a_stage_without_layers() -> None:
    empty = rank(groups=0, last_group_layers=0, units=0, committed=0, waste_bytes=0)
    found = units_of([rank(), empty], 1)
    assert found is not None
    assert (found.groups, found.last_group_layers, found.committed) == (5, 4, 20)


def test_without_units() -> None:
    assert units_of([None, None], 1) is None
