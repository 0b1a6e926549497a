"""What a run came to, in the figures of Llumnix's evaluation (section 6): latencies, preemption loss, moves, memory."""

from collections.abc import Sequence
from statistics import fmean

from pydantic import BaseModel, ConfigDict

from meshift.services.simulation.clients import Outcome
from meshift.services.simulation.probe import ClusterSums


class Spread(BaseModel):
    """Of one figure over all requests."""

    model_config = ConfigDict(frozen=True)

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Percentiles by nearest rank; zeros of nothing."""
        if not values:
            return cls(mean=0.0, p50=0.0, p99=0.0)
        ordered = sorted(values)
        p50, p99 = (ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.99))
        return cls(mean=fmean(ordered), p50=p50, p99=p99)


class Measures(BaseModel):
    """One run, or one class of its requests."""

    model_config = ConfigDict(frozen=True)

    requests: int
    prefill_s: Spread
    """From arrival to the first token, queueing included."""
    decode_ms: Spread
    """A token after the first, of requests with more than one."""
    end_to_end_s: Spread
    waited_s: Spread
    """To the first token, and what preemptions cost afterwards. Who lets a prompt in by preempting another has short
    prefills, and this shows what they cost."""
    preemption_loss_s_mean: float
    preempted_share: float
    moves_per_request: float
    reversed_moves: int
    """Back to the instance that it had just come from."""
    moved_often_share: float
    """Requests that moved more than three times."""
    fragmented_share: float
    """Of the cluster's memory: free, wanted by the heads of queues, but scattered; mean over time."""
    used_share: float
    negative_freeness_share: float
    """Of the instances' time."""
    negative_freeness_s_max: float
    instances_mean: float
    virtual_s: float


def measure(outcomes: Sequence[Outcome], sums: ClusterSums, virtual_s: float) -> Measures:
    """Put a run's figures together."""
    count = max(len(outcomes), 1)
    looks = max(sums.looks, 1)
    losses = [preemption_loss_s(outcome) for outcome in outcomes if outcome.finish is not None]
    preempted = sum(outcome.finish is not None and outcome.finish.preemptions > 0 for outcome in outcomes)
    moves = [outcome.moves for outcome in outcomes]
    return Measures(
        requests=len(outcomes),
        prefill_s=Spread.of([prefill_s(outcome) for outcome in outcomes]),
        decode_ms=Spread.of([decode_ms(outcome) for outcome in outcomes if len(outcome.tokens) > 1]),
        end_to_end_s=Spread.of([end_to_end_s(outcome) for outcome in outcomes]),
        waited_s=Spread.of([waited_s(outcome) for outcome in outcomes]),
        preemption_loss_s_mean=fmean(losses) if losses else 0.0,
        preempted_share=preempted / count,
        moves_per_request=sum(moves) / count,
        reversed_moves=sum(map(reversals, outcomes)),
        moved_often_share=sum(value > 3 for value in moves) / count,
        fragmented_share=sums.fragmented / looks,
        used_share=sums.used / looks,
        negative_freeness_share=sums.negative / max(sums.instances, 1),
        negative_freeness_s_max=sums.negative_s_max,
        instances_mean=sums.instances / looks,
        virtual_s=virtual_s,
    )


def prefill_s(outcome: Outcome) -> float:
    """Arrival to first token."""
    assert outcome.first_s is not None
    return outcome.first_s - outcome.arrival_s


def decode_ms(outcome: Outcome) -> float:
    """A token after the first."""
    assert outcome.first_s is not None
    assert outcome.last_s is not None
    return 1000 * (outcome.last_s - outcome.first_s) / (len(outcome.tokens) - 1)


def end_to_end_s(outcome: Outcome) -> float:
    """Arrival to last token."""
    assert outcome.last_s is not None
    return outcome.last_s - outcome.arrival_s


def preemption_loss_s(outcome: Outcome) -> float:
    """From each preemption until what it had cost was computed again."""
    return 0.0 if outcome.finish is None else outcome.finish.preemption_loss_ns / 1e9


def waited_s(outcome: Outcome) -> float:
    """Time in which it neither decoded nor had ended."""
    return prefill_s(outcome) + preemption_loss_s(outcome)


def reversals(outcome: Outcome) -> int:
    """Moves of one request back to where it had just come from."""
    return sum(before == after for before, after in zip(outcome.owners, outcome.owners[2:], strict=False))
