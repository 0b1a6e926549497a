"""The arithmetic of stacked layers, against counting by hand."""

import itertools
import random
from fractions import Fraction

import pytest

from meshift.kv_memory.stacking import (
    CUDA_UNIT_BYTES,
    OS_PAGE_BYTES,
    Stacking,
    default_unit_bytes,
    expected_utilisation,
)


def test_llama_70b_on_cuda() -> None:
    stacking = Stacking(layers=80, heads=8, head_dim=128, element_bytes=2, unit_bytes=CUDA_UNIT_BYTES)
    assert (stacking.page_tokens, stacking.groups) == (128, 20)
    assert not stacking.waste
    assert stacking.affine


def test_smollm2_on_a_cpu() -> None:
    unit_bytes = default_unit_bytes(heads=3, head_dim=64, element_bytes=4)
    stacking = Stacking(layers=30, heads=3, head_dim=64, element_bytes=4, unit_bytes=unit_bytes)
    assert (unit_bytes, stacking.page_tokens, stacking.groups) == (98304, 16, 8)
    assert list(stacking.layers_of(7)) == [28, 29]
    assert stacking.waste_bytes(0) == 0
    assert stacking.waste_bytes(7) == unit_bytes // 2
    assert stacking.waste == Fraction(1, 16)
    assert "6.25% waste" in stacking.describe()


def test_blocks_hold_what_they_must_without_overlap() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for _ in range(200):
        shape = {
            "layers": dice.randint(1, 12),
            "heads": dice.randint(1, 9),
            "head_dim": dice.randint(1, 130),
            "element_bytes": dice.choice((1, 2, 4)),
        }
        k = dice.randint(1, 8)
        sizes = {name: shape[name] for name in ("heads", "head_dim", "element_bytes")}
        unit_bytes = default_unit_bytes(**sizes, layers_per_group=k)
        stacking = Stacking(**shape, unit_bytes=unit_bytes, layers_per_group=k)
        token = 2 * shape["heads"] * shape["head_dim"] * shape["element_bytes"]
        assert unit_bytes % OS_PAGE_BYTES == 0
        assert unit_bytes - OS_PAGE_BYTES < 16 * k * token <= unit_bytes
        assert stacking.page_tokens == unit_bytes // (k * token) >= 16
        assert [layer for group in range(stacking.groups) for layer in stacking.layers_of(group)] == list(
            range(shape["layers"])
        )
        wasted = 0
        for group in range(stacking.groups):
            starts = sorted(
                slot * stacking.token_stride + offset
                for slot in range(stacking.page_tokens)
                for layer in stacking.layers_of(group)
                for offset in (stacking.key_offset(layer), stacking.value_offset(layer))
            )
            assert all(after - before >= token // 2 for before, after in itertools.pairwise(starts))
            assert starts[0] == 0
            assert starts[-1] + token // 2 <= unit_bytes
            assert stacking.waste_bytes(group) == unit_bytes - len(starts) * token // 2
            wasted += stacking.waste_bytes(group)
        assert stacking.waste == Fraction(wasted, stacking.groups * unit_bytes)


def test_splits_between_groups_only() -> None:
    stacking = Stacking(layers=30, heads=1, head_dim=1, element_bytes=1, unit_bytes=OS_PAGE_BYTES)
    assert stacking.groups_of(0, 16) == range(4)
    assert stacking.groups_of(16, 30) == range(4, 8)
    assert stacking.groups_of(30, 30) == range(8, 8)
    with pytest.raises(ValueError, match="nearest are 12, 16"):
        stacking.groups_of(0, 15)
    with pytest.raises(ValueError, match="nearest are 28, 30"):
        stacking.groups_of(29, 30)


@pytest.mark.parametrize("change", [{"unit_bytes": 7}, {"layers": 0}, {"layers_per_group": 0}, {"element_bytes": -1}])
def test_what_cannot_be(change: dict[str, int]) -> None:
    good = {"layers": 2, "heads": 1, "head_dim": 1, "element_bytes": 1, "unit_bytes": 8}
    Stacking(**good)
    with pytest.raises(ValueError, match=r"positive|can't hold"):
        Stacking(**{**good, **change})
    with pytest.raises(IndexError):
        Stacking(**good).layers_of(1)
    with pytest.raises(IndexError):
        Stacking(**good).key_offset(2)


def test_closed_form_of_utilisation() -> None:
    assert expected_utilisation(1, 512, {512: 3}) == 1
    assert expected_utilisation(1, 512, {256: 1}) == Fraction(1, 2)
    assert expected_utilisation(4, 512, {129: 1, 128: 2}) == Fraction(129 + 256, 512)
    assert expected_utilisation(4, 512, {}) == 1
