"""A measurement of requests that must run at once, on a probe that says when their tokens came."""

import itertools
from typing import Any, cast

import pytest

from meshift.schemas.identity import RequestKey
from meshift.services.calibration.measuring import Sample, measure
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
