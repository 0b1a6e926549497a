"""Gather and scatter of slots, the torch reference and the compiled ones: against plain indexing, token by token."""

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from meshift.kernels import slots as reference  # noqa: E402
from meshift.kernels.cpu import slots as compiled  # noqa: E402
from meshift.kernels.slots import gather_slots, scatter_slots, staging_shape  # noqa: E402

LAYERS, SLOTS, HEADS, HEAD_DIM = 3, 20, 4, 8
DTYPES = ["float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "uint8", "int8"]

Tensor = Any


@pytest.fixture(params=[reference, compiled], ids=["reference", "compiled"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs on both."""
    for name in ("gather_slots", "scatter_slots"):
        monkeypatch.setitem(globals(), name, getattr(request.param, name))


def random_bits(generator: Any, *shape: int, dtype: str = "float32") -> Tensor:
    """Any bit pattern, NaNs included."""
    kind = getattr(torch, dtype)
    size = torch.empty(0, dtype=kind).element_size()
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, generator=generator).view(kind)


def make_buffers(layout: str, generator: Any, dtype: str) -> list[tuple[Tensor, Tensor]]:
    """Per layer K and V, as different engines keep them."""
    if layout == "separate":
        shape = (SLOTS, HEADS, HEAD_DIM)
        return [
            (random_bits(generator, *shape, dtype=dtype), random_bits(generator, *shape, dtype=dtype))
            for _ in range(LAYERS)
        ]
    if layout == "stacked":
        stack = random_bits(generator, SLOTS, LAYERS, 2, HEADS, HEAD_DIM, dtype=dtype)
        return [(stack[:, layer, 0], stack[:, layer, 1]) for layer in range(LAYERS)]
    wide = random_bits(generator, LAYERS, 2, SLOTS, HEADS * 2, HEAD_DIM, dtype=dtype)
    return [(wide[layer, 0][:, 2 : 2 + HEADS], wide[layer, 1][:, 2 : 2 + HEADS]) for layer in range(LAYERS)]


def raw(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


@pytest.fixture
def generator() -> Any:
    return torch.Generator().manual_seed(7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["separate", "stacked", "some heads"])
def test_gather_is_byte_identical(layout: str, dtype: str, generator: Any) -> None:
    buffers = make_buffers(layout, generator, dtype)
    slots = [5, 0, 19, 7, 7, 2]
    out = torch.empty(staging_shape(buffers, len(slots)), dtype=getattr(torch, dtype))
    assert gather_slots(buffers, torch.tensor(slots), out) is out
    for layer, pair in enumerate(buffers):
        for token, slot in enumerate(slots):
            for which in range(2):
                assert raw(out[layer, token, which]) == raw(pair[which][slot])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["separate", "stacked", "some heads"])
def test_scatter_is_byte_identical_and_touches_nothing_else(layout: str, dtype: str, generator: Any) -> None:
    buffers = make_buffers(layout, generator, dtype)
    before = [tuple(tensor.clone() for tensor in pair) for pair in buffers]
    slots = [5, 0, 19, 7]
    staging = random_bits(generator, *staging_shape(buffers, len(slots)), dtype=dtype)
    scatter_slots(staging, torch.tensor(slots, dtype=torch.int32), buffers)
    for layer, pair in enumerate(buffers):
        for slot in range(SLOTS):
            for which in range(2):
                kept = before[layer][which][slot]
                expected = staging[layer, slots.index(slot), which] if slot in slots else kept
                assert raw(pair[which][slot]) == raw(expected)


def test_scatter_into_a_part_of_the_heads_leaves_the_others(generator: Any) -> None:
    wide = random_bits(generator, SLOTS, HEADS * 2, HEAD_DIM)
    before = wide.clone()
    part = [(wide[:, :HEADS], wide[:, HEADS:])]
    scatter_slots(torch.zeros(1, 2, 2, HEADS, HEAD_DIM), torch.tensor([3, 9]), part)
    kept = [slot for slot in range(SLOTS) if slot not in (3, 9)]
    assert raw(wide[kept]) == raw(before[kept])
    assert not wide[[3, 9]].any()


@pytest.mark.parametrize("seed", range(5))
def test_round_trip_between_different_slots(seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    source = make_buffers("stacked", generator, "bfloat16")
    destination = make_buffers("separate", generator, "bfloat16")
    ours, theirs = (torch.tensor(rng.sample(range(SLOTS), 9)) for _ in range(2))
    staging = torch.empty(staging_shape(source, 9), dtype=torch.bfloat16)
    scatter_slots(gather_slots(source, ours, staging), theirs, destination)
    again = gather_slots(destination, theirs, torch.empty_like(staging))
    assert raw(again) == raw(gather_slots(source, ours, staging))


def test_no_tokens(generator: Any) -> None:
    buffers = make_buffers("separate", generator, "float32")
    before = raw(buffers[0][0])
    nothing = torch.empty(0, dtype=torch.int64)
    out = gather_slots(buffers, nothing, torch.empty(staging_shape(buffers, 0)))
    scatter_slots(out, nothing, buffers)
    assert raw(buffers[0][0]) == before


@pytest.mark.parametrize("slots", [[0, SLOTS], [-1, 0]])
def test_slots_that_do_not_exist(slots: list[int], generator: Any) -> None:
    buffers = make_buffers("separate", generator, "float32")
    before = [raw(tensor) for pair in buffers for tensor in pair]
    staging = torch.zeros(staging_shape(buffers, 2))
    with pytest.raises(IndexError):
        gather_slots(buffers, torch.tensor(slots), staging)
    with pytest.raises(IndexError):
        scatter_slots(staging, torch.tensor(slots), buffers)
    assert [raw(tensor) for pair in buffers for tensor in pair] == before


def test_what_does_not_fit_is_refused(generator: Any) -> None:
    buffers = make_buffers("separate", generator, "float32")
    shape = staging_shape(buffers, 2)
    slots, staging = torch.tensor([1, 2]), torch.zeros(shape)
    odd = [*buffers[:2], (buffers[2][0], buffers[2][1][:, :2])]
    other_type = [*buffers[:2], (buffers[2][0], buffers[2][1].double())]
    cases = [
        (buffers, slots, torch.zeros(*shape[:1], 3, *shape[2:])),
        (buffers, slots, torch.zeros(*shape[:-1], HEAD_DIM * 2)[..., ::2]),
        (buffers, slots, staging.to(torch.float16)),
        (buffers, slots.reshape(1, 2), staging),
        (buffers, slots.double(), staging),
        (odd, slots, staging),
        (other_type, slots, staging),
        ([], slots, staging),
    ]
    for bad_buffers, bad_slots, bad_staging in cases:
        with pytest.raises(ValueError, match=r".+"):
            gather_slots(bad_buffers, bad_slots, bad_staging)
        with pytest.raises(ValueError, match=r".+"):
            scatter_slots(bad_staging, bad_slots, bad_buffers)


def test_staging_is_the_payload_of_a_transfer(generator: Any) -> None:
    """The numpy fake's payload of the same content has the same bytes."""
    import numpy as np

    from meshift.kv_memory.matrix import MatrixKv
    from meshift.kv_memory.rectangle import Rectangle

    buffers = make_buffers("stacked", generator, "float32")
    slots = [4, 11, 3]
    staging = gather_slots(buffers, torch.tensor(slots), torch.empty(staging_shape(buffers, 3)))
    owned = Rectangle(0, LAYERS, 0, SLOTS, 0, HEADS)
    kv = MatrixKv(owned, SLOTS, HEAD_DIM)
    kv.array[...] = np.stack([torch.stack(pair, 1).numpy() for pair in buffers])
    assert kv.request(slots).gather(Rectangle(0, LAYERS, 0, 3, 0, HEADS)) == raw(staging)


def test_new_tokens_into_one_layer(generator: Any) -> None:
    from meshift.kernels.places import KvPlace

    buffers = make_buffers("stacked", generator, "bfloat16")
    before = [tuple(tensor.clone() for tensor in pair) for pair in buffers]
    fused = random_bits(generator, 3, 2 * HEADS + 1, HEAD_DIM, dtype="bfloat16")
    key, value = fused[:, :HEADS], fused[:, HEADS : 2 * HEADS]
    place = KvPlace.of_buffers(*buffers[1])
    compiled.store_tokens(place, torch.tensor([7, 0, 19]), key, value)
    for which, new in ((0, key), (1, value)):
        before[1][which][[7, 0, 19]] = new
    assert [raw(tensor) for pair in buffers for tensor in pair] == [raw(tensor) for pair in before for tensor in pair]
    for slots, wrong in [
        (torch.tensor([1, 2]), key),
        (torch.tensor([1, 2, 3], dtype=torch.int32), key),
        (torch.tensor([1, 2, 3]), key.float()),
        (torch.tensor([1, 2, 3]), fused[:, : 2 * HEADS : 2]),
    ]:
        with pytest.raises(ValueError, match=r"fit|int64"):
            compiled.store_tokens(place, slots, wrong, value)
