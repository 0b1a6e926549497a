"""A measurement of requests that must run at once, on a probe that says when their tokens came."""

import itertools
from typing import Any, cast

import pytest

from meshift.backends.sim.parameters import SimParameters
from meshift.schemas.identity import RequestKey
from meshift.services.calibration.growth import StepGrowth
from meshift.services.calibration.measuring import Sample, measure, step_growth
from meshift.services.calibration.plan import Cell, output_tokens
from meshift.services.calibration.probe import InstanceProbe, ProbedRequest, ProbeError

CELL = Cell("decode", 2, 32, 8)


class Probe:
    """Requests begin `apart_ns` after one another, and take a token a nanosecond."""

    def __init__(self, apart_ns: int) -> None:
        self.asked: list[int] = []
        self._apart_ns = apart_ns

    async def until_idle(self) -> None:
        """It always is."""

    async def generate(self, requests: int, prompt_tokens: int, tokens: int) -> list[ProbedRequest]:
        self.asked.append(tokens)
        starts = itertools.count(0, self._apart_ns)
        emitted = [list(range(start, start + tokens)) for start in itertools.islice(starts, requests)]
        return [ProbedRequest(RequestKey("r", 1, 0), prompt_tokens, 0.0, 0.0, times) for times in emitted]


async def measured(probe: Probe) -> list[Sample]:
    def keep(_: Sample) -> None: ...

    return await measure(cast(InstanceProbe, probe), [(0, CELL)], [], keep)


@pytest.mark.parametrize(("apart", "tries"), [(0, 1), (1, 2), (3, 3)], ids=["at once", "late", "very late"])
async def test_outputs_are_longer_where_requests_did_not_meet(apart: int, tries: int) -> None:
    tokens = output_tokens(CELL)
    probe = Probe(apart * tokens)
    (sample,) = await measured(probe)
    steps: list[Any] = sample["steps"]
    assert len(steps) >= CELL.steps
    assert probe.asked == [tokens, 2 * tokens, 4 * tokens][:tries]


async def test_requests_that_never_meet() -> None:
    with pytest.raises(ProbeError, match="never ran at once"):
        await measured(Probe(10_000))


@pytest.mark.parametrize(
    ("changes", "full_step_times", "request_tokens"),
    [
        # (28 + 53.2 * 0.35 + 30) / (28 + 0.35 + 0.56)
        ({}, 2.65, 159.1),
        # 42 more for all batches but one of one request.
        ({"decode_shared_ns": 42_000_000}, 4.10, 159.1),
        ({"decode_request_ns": 0}, 2.03, 0.0),
        ({"decode_token_ns": 0}, 1.65, 13_616.0),
        ({"decode_token_ns": 0, "decode_request_ns": 0}, 1.01, 0.0),
        ({"decode_step_ns": 1, "decode_request_ns": 0, "capacity": 100_000}, 100.0, 0.0),
    ],
)
def test_how_steps_grow(changes: dict[str, int], full_step_times: float, request_tokens: float) -> None:
    growth = step_growth(SimParameters().model_copy(update=changes), 256)
    assert growth.full_step_times == pytest.approx(full_step_times, rel=0.01)
    assert growth.request_tokens == pytest.approx(request_tokens, rel=0.01)
    assert StepGrowth.model_validate(growth.model_dump()) == growth
