"""Which tokens a moved request's penalties have counted at each of its steps: those of an undisturbed one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshift.backends.sglang.plugin import penalties

VOCABULARY = 12
PROMPT, OUTPUT = [3, 7], [5, 1, 5, 8, 2, 9]


class Counter:
    """A frequency penalizer of weight one: counts are readable."""

    def __init__(self, rows: int) -> None:
        self.cumulated_frequency_penalties = torch.zeros(rows, VOCABULARY)

    def is_prepared(self) -> bool:
        return True


def batch_of(*outputs: list[int], overlap: bool) -> Any:
    """Requests with so much of their output, on their way into a batch."""
    reqs = [
        SimpleNamespace(origin_input_ids=PROMPT, output_ids=output, mesh=SimpleNamespace(skips_count=False))
        for output in outputs
    ]
    orchestrator = SimpleNamespace(penalizers={Counter: Counter(len(reqs))}, is_required=True)
    return SimpleNamespace(
        reqs=reqs,
        device="cpu",
        enable_overlap=overlap,
        forward_mode=SimpleNamespace(is_extend=lambda: False, is_prebuilt=lambda: True),
        sampling_info=SimpleNamespace(penalizer_orchestrator=orchestrator),
    )


def count_last(batch: Any) -> None:
    """What SGLang does before each step: count each request's last token."""
    counter = batch.sampling_info.penalizer_orchestrator.penalizers[Counter]
    for row, req in enumerate(batch.reqs):
        counter.cumulated_frequency_penalties[row][(req.output_ids or req.origin_input_ids)[-1]] += 1


def enter(batch: Any, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Replay into the new batch; its counts."""
    counter: Counter = batch.sampling_info.penalizer_orchestrator.penalizers[Counter]

    def count(orchestrator: Any, row: int, tokens: torch.Tensor) -> None:
        counter.cumulated_frequency_penalties[row].index_add_(0, tokens, torch.ones(len(tokens)))

    monkeypatch.setattr(penalties, "_count", count)
    penalties.replay_output(batch.sampling_info, batch)
    return counter.cumulated_frequency_penalties


def counts(tokens: list[int]) -> torch.Tensor:
    return torch.bincount(torch.tensor(tokens), minlength=VOCABULARY).to(torch.float32)


@pytest.mark.parametrize("cut", range(1, len(OUTPUT)))
def test_without_overlap(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(OUTPUT[:cut], overlap=False)
    counted = enter(batch, monkeypatch)
    for known in range(cut, len(OUTPUT)):
        batch.reqs[0].output_ids = OUTPUT[:known]
        penalties.count_step(count_last, batch)
        # An undisturbed request samples token `known` with all before it counted.
        assert torch.equal(counted[0], counts(OUTPUT[:known])), known


@pytest.mark.parametrize("cut", range(1, len(OUTPUT)))
def test_with_overlap(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(OUTPUT[:cut], overlap=True)
    counted = enter(batch, monkeypatch)
    for known in range(cut, len(OUTPUT)):
        # A step is prepared before the result of the one before it is known; the first one finds all of it.
        batch.reqs[0].output_ids = OUTPUT[: max(cut, known - 1)]
        penalties.count_step(count_last, batch)
        assert torch.equal(counted[0], counts([PROMPT[-1], *OUTPUT[: known - 1]])), known


def test_neighbours_count_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(OUTPUT[:2], OUTPUT[:3], overlap=True)
    counted = enter(batch, monkeypatch)
    batch.reqs[1].mesh.skips_count = False
    before = counted.clone()
    penalties.count_step(count_last, batch)
    assert torch.equal(counted[0], before[0])
    assert counted[1, OUTPUT[2]] == before[1, OUTPUT[2]] + 1
    assert not batch.reqs[0].mesh.skips_count
