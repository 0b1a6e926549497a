"""The timing model out of measurements: exact ones give it back, noisy ones nearly."""

import random
from itertools import product

import pytest

from meshift.backends.sim.parameters import SimParameters
from meshift.services.calibration.fit import (
    DecodePoint,
    FitError,
    PrefillPoint,
    fit_decode,
    fit_prefill,
    fitted_parameters,
    nonnegative_least_squares,
)

SEED = 7


def decode_points(parameters: SimParameters, noise: random.Random | None = None) -> list[DecodePoint]:
    cost = parameters.step_cost(copying=False)
    return [
        DecodePoint(
            requests,
            requests * context,
            cost.step_ns(requests, requests * context) * (noise.gauss(1.0, 0.02) if noise else 1.0),
        )
        for requests, context in product((1, 2, 4, 8, 16), (32, 256, 1024))
    ]


def prefill_points(parameters: SimParameters) -> list[PrefillPoint]:
    return [PrefillPoint(n, parameters.prefill_ns(n, n * n)) for n in (16, 64, 256, 1024, 4096)]


@pytest.mark.parametrize("shared_ns", [0, 60_000_000])
def test_exact_measurements_give_the_model_back(shared_ns: int) -> None:
    true = SimParameters(decode_shared_ns=shared_ns)
    decode, prefill = fit_decode(decode_points(true)), fit_prefill(prefill_points(true))
    assert fitted_parameters(SimParameters(), decode, prefill) == true
    assert decode.error_max < 1e-9
    assert prefill.error_max < 1e-9


def test_noise_of_two_percent_moves_predictions_by_less() -> None:
    print(f"seed {SEED}")
    true = SimParameters()
    decode = fit_decode(decode_points(true, random.Random(SEED)))
    step, request, token, shared = decode.coefficients
    for point in decode_points(true):
        predicted = step + request * point.requests + token * point.tokens + shared * (point.requests > 1)
        assert predicted == pytest.approx(point.step_ns, rel=0.02)
    assert 0.001 < decode.error_p50 < 0.03


def test_a_coefficient_is_never_negative() -> None:
    """Steps that become faster with more requests: the best model has no cost a request."""
    points = [DecodePoint(n, n * 100 + extra, 50e6 - 1e6 * n) for n, extra in product((1, 2, 4, 8), (0, 50))]
    assert min(fit_decode(points).coefficients) == 0.0
    assert max(fit_decode(points).coefficients) > 0.0
    batch, token, squared = fit_prefill([PrefillPoint(n, 1e6 * n**0.5) for n in (16, 64, 256, 1024)]).coefficients
    assert min(batch, token, squared) >= 0.0


def test_an_outlier_counts_by_its_share() -> None:
    """Both are off by a tenth, one of 10 ms and one of a second: the small one isn't lost beside the great one."""
    points = [PrefillPoint(n, 1e6 * n) for n in (10, 20, 500, 1000)]
    small = fit_prefill([PrefillPoint(10, 11e6), *points[1:]])
    great = fit_prefill([*points[:3], PrefillPoint(1000, 1100e6)])
    assert abs(small.errors[0]) > 0.01
    assert abs(great.errors[3]) > 0.01


@pytest.mark.parametrize(
    "points",
    [
        [],
        [DecodePoint(1, 10, 1e6)],
        [DecodePoint(1, tokens, 1e6) for tokens in (10, 20, 30)],
        [DecodePoint(requests, 100, 1e6) for requests in (1, 2, 4)],
    ],
)
def test_too_few_batches_are_no_model(points: list[DecodePoint]) -> None:
    with pytest.raises(FitError, match="batches of different sizes"):
        fit_decode(points)


def test_too_few_prompts_are_no_model() -> None:
    with pytest.raises(FitError, match="three lengths"):
        fit_prefill([PrefillPoint(16, 1e6), PrefillPoint(64, 2e6), PrefillPoint(64, 3e6)])


def test_rows_of_zeros_determine_nothing() -> None:
    with pytest.raises(FitError, match="don't determine"):
        nonnegative_least_squares([(0.0, 0.0), (0.0, 0.0)], [1.0, 2.0])
