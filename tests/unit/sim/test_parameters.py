"""The frozen numbers."""

import pytest
from pydantic import ValidationError

from meshift.backends.sim import SimParameters


def test_defaults_are_the_table_of_the_design() -> None:
    parameters = SimParameters()
    assert parameters.pages * parameters.page_size == 13_616
    cost = parameters.step_cost(copying=False)
    # 28 + 0.35 * batch + 0.0022 * tokens, ms
    assert cost.base + 30 * cost.request + 10_000 * cost.token == 28_000_000 + 10_500_000 + 22_000_000
    # 20 + sum(0.30 * n + 5e-6 * n^2), ms
    assert parameters.prefill_ns(3_000, 1_000**2 + 2_000**2) == 20_000_000 + 900_000_000 + 25_000_000
    # 5 ms, and 0.5 MB a token at 1.5 GB/s
    assert parameters.copy_ns(3_000) == pytest.approx(5_000_000 + 1_000_000_000, rel=1e-5)
    assert parameters.cutover_ns == 25_000_000
    assert parameters.prefill_tokens_max == 12_800


def test_copying_makes_every_step_one_percent_longer() -> None:
    plain, copying = (SimParameters().step_cost(copying=flag) for flag in (False, True))
    for one, other in zip(plain, copying, strict=True):
        assert other * 100 == one * 101


def test_hash_names_the_numbers() -> None:
    assert SimParameters().parameters_hash() == SimParameters().parameters_hash()
    assert SimParameters().parameters_hash() != SimParameters(capacity=13_632).parameters_hash()
    assert len(SimParameters().parameters_hash()) == 16


def test_faster_scales_all_times_and_nothing_else() -> None:
    fast = SimParameters(cold_start_ns=30_000_000_000).faster(10.0)
    assert fast.decode_step_ns == 2_800_000
    assert fast.decode_token_ns == 220
    assert fast.prefill_token_squared_ns == 0
    assert fast.cold_start_ns == 3_000_000_000
    assert fast.capacity == 13_616
    assert fast.send_timeout_ns == SimParameters().send_timeout_ns
    assert SimParameters().faster(1e12).decode_step_ns == 1


def test_nonsense_is_refused() -> None:
    for wrong in ({"page_size": 0}, {"decode_step_ns": 0}, {"eos_per_million": 1_000_001}, {"colour": 1}):
        with pytest.raises(ValidationError):
            SimParameters.model_validate(wrong)


def test_pages_round_up() -> None:
    parameters = SimParameters()
    assert [parameters.pages_of(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
