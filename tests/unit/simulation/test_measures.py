"""What a run comes to."""

from array import array

from meshift.schemas.requests import Finish, FinishReason, Priority, Sampling
from meshift.services.frontend.api import GenerateRequest
from meshift.services.simulation.clients import Outcome
from meshift.services.simulation.measures import Spread, measure
from meshift.services.simulation.probe import ClusterSums


def outcome(arrival_s: float, first_s: float, last_s: float, tokens: int, **changes: object) -> Outcome:
    request = GenerateRequest("r", "m", array("i", [1]), Sampling(max_new_tokens=tokens), Priority())
    made = Outcome(request, arrival_s, first_s, last_s, tokens=array("i", range(tokens)))
    made.finish = Finish(reason=FinishReason.LENGTH)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_percentiles_are_by_nearest_rank() -> None:
    spread = Spread.of([float(value) for value in range(200)])
    assert (spread.mean, spread.p50, spread.p99) == (99.5, 100.0, 198.0)
    assert Spread.of([]) == Spread(mean=0, p50=0, p99=0)


def test_figures_of_a_run() -> None:
    lost = Finish(reason=FinishReason.LENGTH, preemptions=2, preemption_loss_ns=3_000_000_000)
    outcomes = [
        outcome(1.0, 1.5, 3.5, 21, owners=["a", "b", "a", "b"], moves=3),
        outcome(2.0, 4.0, 4.0, 1, finish=lost),
        outcome(2.0, 3.0, 5.0, 11, owners=["a", "b", "c", "a", "d"], moves=4),
    ]
    sums = ClusterSums(looks=4, instances=8, negative=2, fragmented=0.2, used=2.0, negative_s_max=0.5)
    measures = measure(outcomes, sums, 9.0)
    assert measures.prefill_s == Spread(mean=3.5 / 3, p50=1.0, p99=2.0)
    assert measures.decode_ms == Spread(mean=150.0, p50=200.0, p99=200.0)
    assert measures.end_to_end_s.p99 == 3.0
    assert measures.waited_s == Spread(mean=6.5 / 3, p50=1.0, p99=5.0)
    assert measures.preemption_loss_s_mean == 1.0
    assert measures.preempted_share == measures.moved_often_share == 1 / 3
    assert measures.moves_per_request == 7 / 3
    assert measures.reversed_moves == 2
    assert (measures.fragmented_share, measures.used_share) == (0.05, 0.5)
    assert (measures.negative_freeness_share, measures.instances_mean) == (0.25, 2.0)


def test_nothing_at_all() -> None:
    assert measure([], ClusterSums(), 0.0).requests == 0
