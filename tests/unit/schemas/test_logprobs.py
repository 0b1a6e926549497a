"""Packed log-probabilities."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from meshift.schemas.logprobs import ColumnsBuilder, Logprobs, pack_logprobs, unpack_logprobs
from meshift.schemas.requests import LogprobColumns, TokenLogprob


def made(seed: int, top: int, count: int) -> list[TokenLogprob]:
    rng = random.Random(seed)
    return [
        TokenLogprob(-rng.expovariate(1), tuple((rng.randrange(1000), -rng.expovariate(1)) for _ in range(top)))
        for _ in range(count)
    ]


def packed(items: Sequence[TokenLogprob], top: int) -> Logprobs:
    logprobs = Logprobs(top)
    logprobs.extend(items)
    return logprobs


@given(st.integers(0, 2**32), st.integers(0, 4), st.integers(0, 9), st.integers(0, 9))
def test_a_sequence_of_what_was_put_in(seed: int, top: int, count: int, cut: int) -> None:
    items = made(seed, top, count)
    logprobs = packed(items, top)
    assert list(logprobs) == items
    assert list(logprobs[cut:]) == items[cut:]
    assert list(logprobs[:cut]) == items[:cut]
    assert logprobs.byte_count == count * Logprobs.token_bytes(top)
    joined = Logprobs(top)
    joined.extend(logprobs[:cut])
    joined.extend(logprobs[cut:])
    assert joined == logprobs


def test_what_cant_be_joined() -> None:
    logprobs = packed(made(0, 2, 1), 2)
    with pytest.raises(ValueError, match="likeliest"):
        logprobs.extend(packed([], 1))
    with pytest.raises(ValueError, match="likeliest"):
        logprobs.append(-1.0, [(1, -1.0)])
    with pytest.raises(ValueError, match="slices"):
        logprobs[::2]
    assert len(logprobs) == 1
    assert logprobs != made(0, 2, 1)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=6))
def test_columns_to_rows_and_back(shapes: list[tuple[int, int]]) -> None:
    rows = {2 * index: packed(made(index, top, count), top) for index, (top, count) in enumerate(shapes)}
    builder = ColumnsBuilder()
    for row, logprobs in rows.items():
        builder.add(row, logprobs)
    columns = builder.build()
    if not rows:
        assert columns is None
        return
    assert columns is not None
    arrived = LogprobColumns.model_validate_json(columns.model_dump_json())
    assert unpack_logprobs(arrived) == rows


def test_columns_that_dont_add_up() -> None:
    columns = pack_logprobs(packed(made(0, 2, 3), 2))
    assert columns is not None
    good = columns.model_dump()
    for change in ({"counts": (2,)}, {"tops": (1,)}, {"rows": (0, 1)}, {"values": b""}, {"top_tokens": b""}):
        with pytest.raises(ValidationError):
            LogprobColumns(**good | change)
