"""What the engine refuses by itself."""

from collections.abc import Sequence
from typing import Any

import pytest

from meshift.backends.base import EngineRequest
from meshift.backends.sglang.admission import RequestLimits, check_request
from meshift.schemas.errors import ContextTooLong, InvalidRequest
from meshift.schemas.identity import RequestKey
from meshift.schemas.requests import Priority, Sampling

LIMITS = RequestLimits(tokens_max=100, vocabulary_size=50)


def check(prompt: Sequence[int] = (1, 2), output: Sequence[int] = (), priority: int = 0, **sampling: Any) -> None:
    fields = Sampling(**{"max_new_tokens": 10, **sampling})
    check_request(EngineRequest(RequestKey("r", 1, 0), prompt, output, fields, Priority(scheduling=priority)), LIMITS)


def test_good_ones_pass() -> None:
    check()
    check([0, 49] * 45)
    check(
        output=range(10),
        stop_token_ids=(0, 49),
        logit_bias=((49, -100.0),),
        seed=-(2**63),
        top_k=-1,
        min_new_tokens=10,
        priority=-(2**31),
    )


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("prompt", {"prompt": ()}),
        ("prompt", {"prompt": (1, 50)}),
        ("prompt", {"prompt": (-1, 1)}),
        ("output", {"output": (50,)}),
        ("output", {"output": range(11)}),
        ("stop_token_ids", {"stop_token_ids": (50,)}),
        ("logit_bias", {"logit_bias": ((1, 1.0), (50, 1.0))}),
        ("min_new_tokens", {"min_new_tokens": 11}),
        ("top_k", {"top_k": 0}),
        ("seed", {"seed": 2**63}),
        ("priority", {"priority": 2**31}),
    ],
)
def test_bad_ones(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        check(**fields)
    assert raised.value.param == param


def test_too_long() -> None:
    check([1] * 90)
    with pytest.raises(ContextTooLong):
        check([1] * 91)
    with pytest.raises(ContextTooLong):
        check([1], max_new_tokens=100)
