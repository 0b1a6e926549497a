"""From latencies to loads."""

import random

import pytest

from meshift.services.calibration.targets import (
    LoadPoint,
    Target,
    TargetError,
    check_targets,
    load_within,
    monotone,
    parse_target,
    priority_classes,
)

CURVE = [LoadPoint(tokens, 20.0 + tokens / 100) for tokens in (100, 200, 400, 800, 1600)]


def test_a_target_is_a_ratio_or_a_time() -> None:
    assert parse_target("high=1.2x") == Target("high", 1, 1.2, None)
    assert parse_target("high=40ms") == Target("high", 1, None, 40.0)
    assert parse_target(" gold:3=1.05x ") == Target("gold", 3, 1.05, None)
    assert parse_target("batch:-1=2x").execution == -1
    assert (parse_target("high=1.2x").limit(30.0), parse_target("high=40ms").limit(30.0)) == (36.0, 40.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("high", "is no target"),
        ("high=1.2", "is no target"),
        ("high=fast", "is no target"),
        ("high=-3ms", "is no target"),
        ("gold=1.2x", "gold needs its execution priority: gold:2=1.2x"),
        ("high=0.9x", "nothing is faster"),
        ("high=1x", "nothing is faster"),
        ("high=0ms", "above 0"),
    ],
)
def test_what_is_no_target_is_said(text: str, says: str) -> None:
    with pytest.raises(TargetError, match=says):
        parse_target(text)


def test_two_targets_of_one_class_contradict_each_other() -> None:
    with pytest.raises(TargetError, match="name high"):
        check_targets([parse_target("high=1.2x"), parse_target("high:2=1.1x")])
    with pytest.raises(TargetError, match="execution priority 1"):
        check_targets([parse_target("high=1.2x"), parse_target("gold:1=1.1x")])
    check_targets([parse_target("high=1.2x"), parse_target("gold:2=1.1x")])


def test_the_load_is_where_the_curve_crosses_the_limit() -> None:
    assert load_within(CURVE, 25.0) == 500
    assert load_within(CURVE, 24.0) == 400
    assert load_within(CURVE, 36.0) is None
    assert load_within(CURVE, 21.0) == 100
    with pytest.raises(TargetError, match=r"can't be met: a request that is alone takes 21 ms"):
        load_within(CURVE, 20.9)


def test_latencies_that_fall_are_taken_together() -> None:
    points = [LoadPoint(100, 20.0), LoadPoint(200, 40.0), LoadPoint(400, 22.0), LoadPoint(800, 50.0)]
    assert [point.latency_ms for point in monotone(points)] == [20.0, 31.0, 31.0, 50.0]
    rng = random.Random(3)
    noisy = [LoadPoint(tokens, rng.uniform(10, 20)) for tokens in rng.sample(range(5000), 40)]
    smooth = monotone(noisy)
    latencies = [point.latency_ms for point in smooth]
    assert latencies == sorted(latencies)
    assert [point.tokens for point in smooth] == sorted(point.tokens for point in noisy)
    assert sum(latencies) == pytest.approx(sum(point.latency_ms for point in noisy))


def test_classes_are_ordered_and_the_rest_has_no_headroom() -> None:
    usage, limits = priority_classes([parse_target("high=1.5x"), parse_target("gold:2=25ms")], CURVE)
    assert [(item.name, item.execution, item.target_load) for item in usage.classes] == [
        ("gold", 2, 500),
        ("high", 1, 1150),
        ("normal", 0, None),
    ]
    assert limits == {"high": pytest.approx(31.5), "gold": 25.0}
    assert usage.headroom(usage.class_of(2), 4000) == 3500


def test_a_class_that_can_not_be_served_so_is_named() -> None:
    with pytest.raises(TargetError, match=r"high: 5 ms a token can't be met"):
        priority_classes([parse_target("high=5ms")], CURVE)


def test_a_target_for_all_takes_the_place_of_the_normal_class() -> None:
    usage, _ = priority_classes([parse_target("normal=1.5x")], CURVE)
    assert [(item.name, item.target_load) for item in usage.classes] == [("normal", 1150)]
