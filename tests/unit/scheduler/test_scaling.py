"""Auto-scaling."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from meshift.schemas.identity import Owner
from meshift.services.scheduler.policy.demand import TREND_SAMPLES, HeldDemand, Peaks, Trend
from meshift.services.scheduler.policy.observation import InstanceObservation
from meshift.services.scheduler.policy.scaling import (
    ScalingAction,
    ScalingDecision,
    ScalingState,
    cluster_freeness,
    is_short,
    scale,
)
from meshift.services.scheduler.policy.settings import ScalingSettings
from tests.unit.scheduler.kit import instance, instances

SETTINGS = ScalingSettings(enabled=True, figure="ratio", sustain_s=10.0, instances_max=4)
FULL: dict[str, Any] = {"used": 980, "running": 10}
"""A freeness of 2."""


class Scaler:
    """Carries the state from look to look."""

    def __init__(self, settings: ScalingSettings = SETTINGS) -> None:
        self.settings = settings
        self.state = ScalingState()

    def look(self, loads: list[InstanceObservation], now_s: float) -> ScalingDecision:
        decision, self.state = scale(loads, self.state, self.settings, now_s)
        return decision

    def actions(self, loads: list[InstanceObservation], times: range) -> list[tuple[int, str]]:
        looks = [(now, self.look(loads, float(now))) for now in times]
        return [(now, decision.action.value) for now, decision in looks if decision.action is not ScalingAction.NOTHING]


def test_overload_must_last_before_one_is_started() -> None:
    scaler = Scaler()
    assert scaler.actions([instance(**FULL)], range(10)) == []
    assert scaler.look([instance(used=500, running=10)], 10.0).action is ScalingAction.NOTHING
    assert scaler.actions([instance(**FULL)], range(11, 25)) == [(21, "start")]


def test_an_instance_that_is_starting_is_capacity_to_come() -> None:
    scaler = Scaler()
    assert scaler.actions([instance(**FULL)], range(200)) == [(10, "start")], "a cold start of minutes launches one"
    assert scaler.look([instance(**FULL)], 200.0).freeness == (20 + 1000) / 10


def test_a_start_that_never_comes_is_given_up() -> None:
    scaler = Scaler(ScalingSettings(enabled=True, figure="ratio", start_timeout_s=60.0, instances_max=4))
    assert scaler.actions([instance(**FULL)], range(100)) == [(10, "start"), (80, "start")]


def test_an_arrival_ends_its_start_and_the_next_may_follow() -> None:
    scaler = Scaler()
    assert scaler.actions([instance("a", **FULL)], range(20)) == [(10, "start")]
    both = [instance("a", **FULL), instance("b", **FULL)]
    assert scaler.actions(both, range(20, 40)) == [(30, "start")]
    assert len(scaler.state.starting) == 1


def test_never_more_than_the_most() -> None:
    scaler = Scaler()
    loads = [instance(name, **FULL) for name in "abcd"]
    assert scaler.actions(loads, range(60)) == []
    assert "most allowed" in scaler.look(loads, 60.0).why


def test_the_one_with_the_fewest_requests_is_drained() -> None:
    scaler = Scaler()
    loads = [instance("a", used=30, running=3), instance("b", used=90, running=1), instance("c", used=80, running=2)]
    assert scaler.look(loads, 0.0).action is ScalingAction.NOTHING
    decision = scaler.look(loads, 10.0)
    assert (decision.action, decision.owner) == (ScalingAction.DRAIN, Owner("b", 1))
    assert [item.rejected for item in decision.explain().alternatives] == [
        "runs more requests",
        "",
        "runs more requests",
    ]


def test_one_that_drains_is_no_capacity_and_isn_t_drained_again() -> None:
    scaler = Scaler()
    idle = [instance("a"), instance("b"), instance("c")]
    assert scaler.actions(idle, range(11)) == [(10, "drain")]
    now = [instance("a", draining=True), instance("b"), instance("c")]
    assert scaler.actions(now, range(11, 21)) == [(20, "drain")]
    assert scaler.actions([now[0], instance("b", draining=True), now[2]], range(21, 60)) == [], "one is the fewest"


def test_it_comes_down_at_zero_traffic_to_the_fewest() -> None:
    scaler = Scaler(ScalingSettings(enabled=True, figure="ratio", sustain_s=1.0, instances_min=2))
    names = list("abcdef")
    for now_s in range(40):
        decision = scaler.look([instance(name) for name in names], float(now_s))
        if decision.owner is not None:
            names.remove(decision.owner.instance_id)
    assert len(names) == 2


def test_too_few_are_made_up_for_at_once() -> None:
    scaler = Scaler(ScalingSettings(enabled=True, figure="ratio", instances_min=3))
    assert [scaler.look([instance()], now).action.value for now in (0.0, 0.1, 0.2)] == ["start", "start", "nothing"]


def test_a_dry_run_only_tells() -> None:
    scaler = Scaler(SETTINGS.model_copy(update={"dry_run": True}))
    assert scaler.actions([instance(**FULL)], range(25)) == [(10, "start"), (20, "start")]
    assert scaler.state.starting == ()
    assert scaler.look([instance(**FULL)], 30.0).dry_run


def test_one_idle_instance_lifts_the_mean_but_not_the_ratio() -> None:
    loads = [instance("a"), *(instance(name, used=1000, running=20) for name in "bcdefghij")]
    assert cluster_freeness(loads, "mean") == 100
    assert cluster_freeness(loads, "ratio") < 6
    mean = Scaler(ScalingSettings(enabled=True, figure="mean", instances_min=2))
    ratio = Scaler(ScalingSettings(enabled=True, figure="ratio", instances_min=2))
    assert mean.actions(loads, range(11)) == [(10, "drain")]
    assert ratio.actions(loads, range(11)) == [(10, "start")]


def test_neither_headroom_nor_queues_are_load() -> None:
    inflated = [instance(used=500, running=5, headroom=900, head_demand=700, queued_demand=900)]
    assert cluster_freeness(inflated, "ratio") == 100


def test_what_waits_and_has_room_nowhere_is_a_shortage_that_the_figure_does_not_see() -> None:
    blocked = instance(used=800, running=2, waiting=3, head_demand=300, queued_demand=900)
    assert cluster_freeness([blocked], "ratio") == 100
    scaler = Scaler()
    assert scaler.actions([blocked], range(60)) == [(10, "start")], "one, until it has come"
    assert (
        "room nowhere" in Scaler(ScalingSettings(enabled=True, figure="ratio", sustain_s=0.0)).look([blocked], 0.0).why
    )
    assert Scaler(SETTINGS.model_copy(update={"shortage": False})).actions([blocked], range(60)) == []


def test_what_waits_at_the_scheduler_counts_too() -> None:
    loads = [instance("a", used=800, running=4), instance("b", used=600, running=4)]
    assert not is_short(loads, HeldDemand(600, 300))
    assert is_short(loads, HeldDemand(600, 401)), "larger than what is free anywhere"
    assert is_short(loads, HeldDemand(601, 300)), "more than is free together"
    assert not is_short([instance("a", used=1000, running=1, charged=(50, 1))]), "nothing waits"
    assert not is_short([], HeldDemand(10, 10))


def test_memory_that_is_only_scattered_is_no_shortage() -> None:
    blocked = instance("a", used=800, running=2, waiting=1, head_demand=300, queued_demand=300)
    assert not is_short([blocked, instance("b", used=600, running=4)])
    assert is_short([blocked, instance("b", used=750, running=4)])
    queue = instance("a", used=800, running=2, waiting=4, head_demand=300, queued_demand=900)
    assert is_short([queue, instance("b", used=600, running=4)])
    assert not is_short([instance("a", waiting=1, head_demand=300, queued_demand=300)]), "about to begin"
    assert not is_short([])


def test_nothing_is_drained_while_something_waits() -> None:
    scaler = Scaler(SETTINGS.model_copy(update={"instances_max": 2}))
    loads = [instance("a", used=800, running=1, waiting=1, head_demand=1200, queued_demand=1200), instance("b")]
    assert scaler.actions(loads, range(40)) == []


def test_one_whose_requests_have_no_room_elsewhere_is_kept() -> None:
    scaler = Scaler()
    full = [instance("a", used=900, running=1), instance("b", used=600, running=2)]
    assert scaler.actions(full, range(40)) == []
    assert "no room" in scaler.look(full, 40.0).why
    published = Scaler(SETTINGS.model_copy(update={"shortage": False}))
    assert published.actions(full, range(12)) == [(10, "drain")]


LOAD = ScalingSettings(enabled=True, load=0.5, calm_s=20.0, foresight=0.0, instances_max=6)
"""An instance of 1,000 tokens for each 500."""


def test_as_many_are_started_at_once_as_the_load_asks_for() -> None:
    scaler = Scaler(LOAD)
    decision = scaler.look([instance(used=900, running=3, waiting=2, head_demand=300, queued_demand=700)], 0.0)
    assert (decision.action, decision.count, decision.demand) == (ScalingAction.START, 3, 1600)
    assert decision.explain().decision == "start 3 instances"
    assert len(scaler.state.starting) == 3
    assert scaler.actions([instance(used=1000, running=3)], range(1, 30)) == [], "they are capacity to come"


def test_what_waits_at_the_scheduler_is_wanted_too() -> None:
    loads = [instance("a", used=400, running=1)]
    assert scale(loads, ScalingState(), LOAD, 0.0)[0].action is ScalingAction.NOTHING
    assert scale(loads, ScalingState(), LOAD, 0.0, HeldDemand(700, 300))[0].count == 2


def test_a_closed_batch_holds_all_of_its_memory_from_those_that_wait() -> None:
    closed = instance(used=300, running=2, waiting=1, head_demand=100, queued_demand=100, batch_full=True)
    assert scale([closed], ScalingState(), LOAD, 0.0)[0].demand == 1100
    assert scale([instance(used=300, running=2, batch_full=True)], ScalingState(), LOAD, 0.0)[0].demand == 300


def test_never_more_than_the_most_by_load() -> None:
    scaler = Scaler(LOAD)
    assert scaler.look([instance(used=1000, running=3, queued_demand=9000, waiting=9)], 0.0).count == 5


def test_what_a_peak_wanted_is_kept_for_a_while() -> None:
    scaler = Scaler(LOAD)
    calm = [instance("a", used=100, running=1), instance("b", used=100, running=2), instance("c")]
    assert scaler.actions(calm, range(20)) == [], "a scheduler that has just begun knows nothing of peaks"
    full = [instance("a", used=700, running=1), instance("b", used=700, running=2), instance("c")]
    assert scaler.actions(full, range(20, 21)) == []
    assert scaler.actions(calm, range(21, 43)) == [(41, "drain"), (42, "drain")], "20 s after the peak"


MEASURED = LOAD.model_copy(update={"calm_s": None})
"""Twice as long as a start takes."""


def started(scaler: Scaler, took_s: int) -> list[InstanceObservation]:
    """The second instance, which came at that time, and is wanted then."""
    assert scaler.actions([instance("a", used=900, running=3)], range(took_s)) == [(0, "start")]
    both = [instance("a", used=400, running=3), instance("b", used=400, running=3)]
    assert scaler.actions(both, range(took_s, took_s + 1)) == []
    return [instance("a", used=100, running=3), instance("b")]


def test_one_is_spare_when_it_was_not_wanted_for_twice_as_long_as_a_start_took() -> None:
    scaler = Scaler(MEASURED)
    spare = started(scaler, 12)
    assert scaler.state.start_s == 12.0
    assert scaler.actions(spare, range(13, 38)) == [(37, "drain")], "12 s, when it was wanted, and more than 24 s"


def test_what_can_be_back_at_once_can_go_at_once() -> None:
    scaler = Scaler(MEASURED)
    scaler.state = ScalingState(start_s=0.0, known=2)
    assert scaler.actions([instance("a", used=100, running=3), instance("b")], range(1)) == [(0, "drain")]


def test_before_a_start_was_seen_a_minute_without_need_is_calm() -> None:
    scaler = Scaler(MEASURED)
    assert scaler.actions([instance("a", used=100, running=3), instance("b")], range(61)) == [(60, "drain")]


def test_a_calm_that_is_set_holds_whatever_starts_take() -> None:
    scaler = Scaler(LOAD.model_copy(update={"calm_s": 5.0}))
    spare = started(scaler, 12)
    assert scaler.actions(spare, range(13, 19)) == [(18, "drain")]


def test_what_will_be_wanted_when_a_start_is_done_is_wanted() -> None:
    scaler = Scaler(LOAD.model_copy(update={"foresight": 1.0}))
    growing = [[instance("a", used=10 * now, running=1), instance("b")] for now in range(60)]
    looks = [scaler.look(loads, float(now)) for now, loads in enumerate(growing)]
    starts = [(now, look.count, look.demand, look.growth) for now, look in enumerate(looks) if look.owner is None]
    assert starts[14] == (14, 1, 140, 0), "less than half the 30 s that a start may take was seen"
    assert starts[15] == (15, 1, 150, 300), "10 tokens a second"
    asked = [(now, look.demand) for now, look in enumerate(looks) if look.action is ScalingAction.START]
    assert asked == [], "590 and 300 tokens need two instances"
    assert looks[59].explain().inputs["growth"] == 300


def test_a_growth_that_goes_on_brings_instances_before_they_are_full() -> None:
    def asked(foresight: float) -> list[tuple[int, str]]:
        scaler = Scaler(LOAD.model_copy(update={"foresight": foresight}))
        return [
            (now, scaler.look([instance("a", used=10 * now, running=1)], float(now)).action.value) for now in range(60)
        ]

    begun = {share: [now for now, action in asked(share) if action == "start"] for share in (0.0, 0.5, 1.0)}
    assert begun == {0.0: [51], 0.5: [36], 1.0: [21]}, "500 tokens are passed then, or will be in 15 or 30 s"


def test_what_will_be_wanted_is_not_spare() -> None:
    loads = [[instance("a", used=100 + 10 * now, running=1), instance("b")] for now in range(40)]
    for foresight, drained in ((0.0, [20]), (1.0, [])):
        scaler = Scaler(LOAD.model_copy(update={"foresight": foresight}))
        looks = [scaler.look(item, float(now)).action for now, item in enumerate(loads)]
        assert [now for now, action in enumerate(looks) if action is ScalingAction.DRAIN][:1] == drained


def test_growth_is_that_of_the_time_looked_at() -> None:
    trend = Trend()
    for now in range(101):
        trend = trend.after(5 * now if now < 50 else 250, float(now), 32.0)
        assert len(trend.samples) <= TREND_SAMPLES + 2
        if now == 40:
            assert trend.growth(200, 40.0, 32.0) == 160
    assert trend.growth(250, 100.0, 32.0) == 0
    assert trend.growth(314, 100.0, 32.0) == 0, "nothing came in the first half"
    assert trend.growth(10, 100.0, 32.0) == 0, "what shrinks may be a lull"
    assert Trend().growth(9, 1.0, 0.0) == 0
    halves = Trend(((0.0, 100), (10.0, 200), (20.0, 500)))
    assert halves.growth(500, 20.0, 20.0) == 200, "10 a second in the first half, 30 in the second"
    assert halves.growth(230, 20.0, 40.0) == 120, "10, and then 3"
    assert halves.growth(230, 20.0, 41.0) == 0, "less than half of it was seen"


def test_one_burst_is_no_trend() -> None:
    scaler = Scaler(LOAD.model_copy(update={"foresight": 1.0}))
    loads = [[instance("a", used=480 * (now >= 40), running=1)] for now in range(100)]
    assert all(scaler.look(item, float(now)).growth == 0 for now, item in enumerate(loads))


@given(st.integers(1, 50), st.floats(0.0, 200.0), st.integers(1, 3), st.integers(1, 300))
def test_a_steady_growth_is_foreseen(slope: int, over_s: float, step_s: int, steps: int) -> None:
    trend, now_s = Trend(), 0
    for now_s in range(0, steps * step_s, step_s):
        trend = trend.after(slope * now_s, float(now_s), over_s)
    growth = trend.growth(slope * now_s, float(now_s), over_s)
    assert growth == 0 or abs(growth - slope * over_s) < 1
    assert growth or now_s <= over_s / 2 + step_s or over_s < 8 * step_s, "too few samples for two halves"


@given(st.lists(st.tuples(st.floats(0.1, 50.0), st.integers(0, 3)), max_size=12), st.floats(1.0, 100.0))
def test_of_starts_that_come_together_the_longest_counts_and_none_longer_than_any_was(
    looks: list[tuple[float, int]], timeout_s: float
) -> None:
    scaler = Scaler(MEASURED.model_copy(update={"start_timeout_s": timeout_s, "instances_max": 16}))
    now_s, serving = 0.0, 1
    for passed_s, more in looks:
        before = scaler.state
        now_s, serving = now_s + passed_s, serving + more
        scaler.look([instance(f"i{number:02}", used=900, running=3) for number in range(serving)], now_s)
        came = before.starting[: max(0, serving - before.known)]
        assert scaler.state.start_s == (now_s - min(came) if came else before.start_s)


def test_the_spare_ones_are_drained_one_after_another_down_to_the_fewest() -> None:
    scaler = Scaler(LOAD.model_copy(update={"instances_min": 2}))
    names = list("abcdef")
    for now_s in range(30):
        decision = scaler.look([instance(name) for name in names], float(now_s))
        if decision.owner is not None:
            names.remove(decision.owner.instance_id)
    assert len(names) == 2


def test_a_prompt_that_fits_nowhere_starts_one_though_the_load_is_low() -> None:
    scaler = Scaler(LOAD.model_copy(update={"load": 2.0}))
    blocked = instance(used=600, running=1, waiting=1, head_demand=500, queued_demand=500)
    assert scaler.actions([blocked], range(40)) == [(10, "start")]


def test_a_dry_run_by_load_says_so_now_and_then() -> None:
    scaler = Scaler(LOAD.model_copy(update={"dry_run": True}))
    assert scaler.actions([instance(used=900, running=3)], range(25)) == [(10, "start"), (20, "start")]
    idle = [instance("a"), instance("b")]
    assert scaler.actions(idle, range(25, 70)) == [(45, "drain"), (65, "drain")]


@given(instances(), st.integers(0, 5000), st.floats(0.1, 2.0), st.integers(0, 3))
def test_by_load_it_never_leaves_its_limits_nor_starts_and_drains_at_once(
    loads: list[InstanceObservation], waiting: int, load: float, starting: int
) -> None:
    settings = ScalingSettings(enabled=True, load=load, calm_s=0.0, instances_min=1, instances_max=8)
    serving = sum(not item.is_draining for item in loads)
    state = ScalingState(starting=(0.0,) * starting, known=serving)
    decision, after = scale(loads, state, settings, 1.0, HeldDemand(waiting, waiting))
    total = serving + starting
    if decision.action is ScalingAction.START:
        assert 1 <= decision.count <= max(8, total) - total
        assert len(after.starting) == starting + decision.count
        assert decision.owner is None
    elif decision.action is ScalingAction.DRAIN:
        assert not starting
        assert serving > settings.instances_min
        room = sum(item.report.capacity for item in loads if not item.is_draining and item.owner != decision.owner)
        assert decision.demand <= load * room + 1e-6, "the others are then loaded as they may be"


@given(st.lists(st.tuples(st.floats(0.1, 5.0), st.integers(0, 9)), min_size=1, max_size=40), st.floats(0.0, 20.0))
def test_peaks_are_the_most_of_the_time_looked_at(steps: list[tuple[float, int]], over_s: float) -> None:
    peaks, now_s, told = Peaks(), 0.0, []
    for passed_s, wanted in steps:
        now_s += passed_s
        told.append((now_s, wanted))
        peaks = peaks.after(wanted, now_s, over_s)
        assert peaks.most == max(most for when_s, most in told if now_s - when_s <= over_s)
        assert len(peaks.entries) <= 10
