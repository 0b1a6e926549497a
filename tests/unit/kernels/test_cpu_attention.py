"""The CPU attention kernel against its reference in float64, over odd shapes, for every instruction set here."""

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from meshift.kernels.attention import AttentionBatch, attend_reference  # noqa: E402
from meshift.kernels.cpu.attention import attend, supports  # noqa: E402
from meshift.kernels.cpu.library import InstructionSet, best_instruction_set  # noqa: E402
from meshift.kernels.places import KvPlace  # noqa: E402

ERRORS_MAX = {"float32": 1e-5, "bfloat16": 3e-2}
SEED = 5

Tensor = Any


@pytest.fixture(params=list(InstructionSet), ids=lambda value: value.name)
def instruction_set(request: pytest.FixtureRequest) -> InstructionSet:
    chosen: InstructionSet = request.param
    if chosen > best_instruction_set():
        pytest.skip("this processor lacks it")
    return chosen


def make_batch(generator: Any, lengths: list[int], query_lengths: list[int], slots: int) -> AttentionBatch:
    """Sequences on random slots of their own, in random rows of a table wider than they are."""
    order = torch.randperm(slots, generator=generator).to(torch.int32)
    rows = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)]
    table = torch.full((len(lengths) + 2, max(lengths) + 3), 2**30, dtype=torch.int32)
    taken = 0
    for row, length in zip(rows.tolist(), lengths, strict=True):
        table[row, :length] = order[taken : taken + length]
        taken += length
    starts = torch.tensor([0, *torch.tensor(query_lengths).cumsum(0).tolist()])
    return AttentionBatch(starts, torch.tensor(lengths), table, rows)


def strided(generator: Any, slots: int, heads: int, dim: int, dtype: Any) -> tuple[Tensor, Tensor]:
    """K and V as one layer of a stack of three."""
    stack = torch.randn(slots, 3, 2, heads, dim, generator=generator).to(dtype)
    return stack[:, 1, 0], stack[:, 1, 1]


def error_of(out: Tensor, query: Tensor, key: Tensor, value: Tensor, batch: AttentionBatch, scale: float) -> float:
    expected = attend_reference(query.double(), key.double(), value.double(), batch, scale)
    return float((out.double() - expected).abs().max())


SHAPES = [(1, 1, 1), (9, 3, 64), (5, 5, 5), (12, 2, 17), (7, 1, 80), (2, 1, 512)]
BATCHES = [
    ([63, 64, 65, 1, 257], [1, 1, 1, 1, 1]),
    ([40, 1, 130, 65], [40, 1, 7, 1]),
    ([70, 129], [70, 2]),
]


CASES = [
    # Each type with each shape and with each batch; all of them together in a soak.
    pytest.param(dtype, heads, sizes, marks=[pytest.mark.soak] if (d + h + b) % 2 else [])
    for d, dtype in enumerate(ERRORS_MAX)
    for h, heads in enumerate(SHAPES)
    for b, sizes in enumerate(BATCHES)
]


@pytest.mark.parametrize(("dtype", "heads", "sizes"), CASES)
def test_matches_the_reference(
    instruction_set: InstructionSet, dtype: str, heads: tuple[int, int, int], sizes: tuple[list[int], list[int]]
) -> None:
    query_heads, kv_heads, dim = heads
    lengths, query_lengths = sizes
    generator = torch.Generator().manual_seed(SEED)
    kind = getattr(torch, dtype)
    slots = sum(lengths) + 9
    key, value = strided(generator, slots, kv_heads, dim, kind)
    query = (torch.randn(sum(query_lengths), query_heads, dim, generator=generator) * 2).to(kind)
    batch = make_batch(generator, lengths, query_lengths, slots)
    out = torch.full_like(query, torch.nan)
    attend(query, KvPlace.of_buffers(key, value), batch, out, dim**-0.5, instruction_set)
    assert error_of(out, query, key, value, batch, dim**-0.5) < ERRORS_MAX[dtype]


def test_over_addresses_of_independent_pages(instruction_set: InstructionSet) -> None:
    generator = torch.Generator().manual_seed(SEED)
    page_tokens, layers, heads, dim, pages = 6, 2, 3, 24, 40
    blocks = [torch.randn(layers, 2, page_tokens, heads, dim, generator=generator) for _ in range(pages)]
    size = 4
    for layer in range(layers):
        place = KvPlace(
            pages=torch.tensor([block.data_ptr() for block in blocks]),
            page_tokens=page_tokens,
            key_offset=blocks[0].stride(0) * layer * size,
            value_offset=(blocks[0].stride(0) * layer + blocks[0].stride(1)) * size,
            token_stride=blocks[0].stride(2) * size,
            head_stride=blocks[0].stride(3) * size,
            slots=pages * page_tokens,
            heads=heads,
            head_dim=dim,
            dtype=torch.float32,
        )
        key, value = (torch.cat([block[layer, which] for block in blocks]) for which in range(2))
        batch = make_batch(generator, [100, 31, 90], [1, 31, 5], pages * page_tokens)
        query = torch.randn(37, 6, dim, generator=generator)
        out = torch.empty_like(query)
        attend(query, place, batch, out, 0.2, instruction_set)
        assert error_of(out, query, key, value, batch, 0.2) < ERRORS_MAX["float32"]


def test_a_token_does_not_depend_on_the_others() -> None:
    """Bit for bit: alone, in company, on one thread or on three."""
    generator = torch.Generator().manual_seed(SEED)
    key, value = strided(generator, 3000, 3, 64, torch.float32)
    place = KvPlace.of_buffers(key, value)
    lengths = [900, 700, 3, 512]
    batch = make_batch(generator, lengths, [1] * 4, 3000)
    query = torch.randn(4, 9, 64, generator=generator)
    together, alone = torch.empty_like(query), torch.empty_like(query)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        attend(query, place, batch, together, 0.125)
        torch.set_num_threads(1)
        for index in range(4):
            one = AttentionBatch(
                torch.tensor([0, 1]), batch.lengths[index : index + 1], batch.slots, batch.rows[index : index + 1]
            )
            attend(query[index : index + 1], place, one, alone[index : index + 1], 0.125)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(together, alone)


def test_extreme_scores() -> None:
    """Far beyond what exp() can hold, equal ones, and -inf-like ones."""
    key = torch.zeros(200, 1, 16)
    key[:100] = torch.linspace(-300, 300, 100)[:, None, None]
    value = torch.randn(200, 1, 16, generator=torch.Generator().manual_seed(SEED))
    batch = AttentionBatch(
        torch.tensor([0, 1, 90]),
        torch.tensor([200, 150]),
        torch.arange(200, dtype=torch.int32)[None],
        torch.zeros(2, dtype=torch.int64),
    )
    query = torch.ones(90, 1, 16)
    out = torch.empty_like(query)
    attend(query, KvPlace.of_buffers(key, value), batch, out, 1.0)
    assert error_of(out, query, key, value, batch, 1.0) < ERRORS_MAX["float32"]


def test_a_batch_without_sequences() -> None:
    key, value = strided(torch.Generator(), 4, 1, 8, torch.float32)
    batch = AttentionBatch(
        torch.tensor([0]),
        torch.empty(0, dtype=torch.int64),
        torch.empty(1, 1, dtype=torch.int32),
        torch.empty(0, dtype=torch.int64),
    )
    attend(torch.empty(0, 1, 8), KvPlace.of_buffers(key, value), batch, torch.empty(0, 1, 8), 1.0)


def test_random_batches(instruction_set: InstructionSet) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(5):
        kv_heads, group, dim = dice.randint(1, 4), dice.randint(1, 9), dice.randint(1, 130)
        lengths = [dice.randint(1, 150) for _ in range(dice.randint(1, 4))]
        query_lengths = [dice.choice((1, length, dice.randint(1, length))) for length in lengths]
        slots = sum(lengths) + dice.randint(0, 5)
        key, value = strided(generator, slots, kv_heads, dim, torch.float32)
        batch = make_batch(generator, lengths, query_lengths, slots)
        wide = torch.randn(sum(query_lengths), group * kv_heads + 2, dim, generator=generator)
        query = wide[:, : group * kv_heads]
        out = torch.empty_like(wide)[:, : group * kv_heads]
        attend(query, KvPlace.of_buffers(key, value), batch, out, dim**-0.5, instruction_set)
        assert error_of(out, query, key, value, batch, dim**-0.5) < ERRORS_MAX["float32"]


def test_refusals() -> None:
    key, value = strided(torch.Generator(), 4, 2, 8, torch.float32)
    place = KvPlace.of_buffers(key, value)
    one = torch.zeros(1, dtype=torch.int64)
    batch = AttentionBatch(torch.tensor([0, 1]), one + 1, torch.zeros(1, 1, dtype=torch.int32), one)
    good = torch.zeros(1, 4, 8)
    for query, out in [
        (torch.zeros(1, 3, 8), torch.zeros(1, 3, 8)),
        (torch.zeros(1, 4, 7), torch.zeros(1, 4, 7)),
        (good.half(), good.half()),
        (good, good.double()),
        (good, torch.zeros(1, 4, 9)),
        (torch.zeros(1, 4, 16)[:, :, ::2], good),
    ]:
        with pytest.raises(ValueError, match=r"fit|contiguous|out is"):
            attend(query, place, batch, out, 1.0)
    with pytest.raises(ValueError, match="differ"):
        KvPlace.of_buffers(key, value[:3])
    with pytest.raises(ValueError, match="contiguous"):
        KvPlace.of_buffers(key[:, :, ::2], value[:, :, ::2])
    for fields in [
        (one, one, torch.zeros(1, 1, dtype=torch.int32), one),
        (batch.query_starts, one, torch.zeros(1, 1), one),
    ]:
        with pytest.raises(ValueError, match=r"agree|int32"):
            AttentionBatch(*fields)
    half = KvPlace.of_buffers(key.half(), value.half())
    assert not supports(half, 4)
    assert supports(place, 4)
