"""Which request moves next."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from meshift.backends.base import ClassUsage
from meshift.schemas.identity import RequestKey
from meshift.services.worker.policy.choice import (
    Choice,
    ChoiceSettings,
    Movable,
    SourceLoad,
    choose_request,
    choose_waiting,
)
from meshift.services.worker.policy.virtual_usage import VirtualUsageSettings, class_loads

USAGE = VirtualUsageSettings()
SETTINGS = ChoiceSettings(cooldown_s=5.0, growth=10, retry_s=5.0)


def movable(name: str, tokens: int, execution: int = 0, **changes: Any) -> Movable:
    return Movable(RequestKey(name, 1, 0), execution, tokens, **changes)


def load(requests: Sequence[Movable], **changes: Any) -> SourceLoad:
    """An overloaded instance of 1,700 tokens that holds these; its headroom for one `high` request is 100 then."""
    used = sum(item.tokens for item in requests)
    classes, _ = class_loads([ClassUsage(item.execution, 1, item.tokens) for item in requests], 1700, USAGE)
    fields = {"capacity": 1700, "used": used, "reserved": 0, "head_demand": 0, "running": len(requests)}
    return SourceLoad(**{**fields, "classes": classes, **changes})


def choose(requests: Sequence[Movable], tokens_max: int = 10_000, **changes: Any) -> Choice:
    until, headroom_max = changes.pop("until_freeness", 1e6), changes.pop("headroom_max", None)
    return choose_request(
        requests,
        load(requests, **changes),
        until_freeness=until,
        tokens_max=tokens_max,
        now_s=100.0,
        usage=USAGE,
        settings=SETTINGS,
        headroom_max=headroom_max,
    )


def name(choice: Choice) -> str | None:
    assert choice.why
    return choice.request.key.request_id if choice.request is not None else None


def test_the_lowest_class_first_then_the_shortest() -> None:
    requests = [movable("a", 300), movable("b", 200), movable("c", 100, execution=1)]
    assert name(choose(requests)) == "b"
    assert name(choose([requests[2]])) == "c"


def test_one_that_moved_a_moment_ago_goes_last_of_its_class() -> None:
    recent = movable("a", 100, moved_s=96.0)
    assert name(choose([recent, movable("b", 200)])) == "b"
    assert name(choose([recent, movable("b", 200, execution=1)])) == "a"
    assert name(choose([movable("a", 100, moved_s=95.0), movable("b", 200)])) == "a"
    assert name(choose([recent])) == "a"


def test_one_that_failed_to_go_there_a_moment_ago_is_not_chosen() -> None:
    failed = movable("a", 100, failed_s=96.0)
    assert name(choose([failed, movable("b", 200)])) == "b"
    assert name(choose([failed])) is None
    assert name(choose([movable("a", 100, failed_s=95.0), movable("b", 200)])) == "a"


def test_the_first_of_the_queue_that_fits_goes() -> None:
    def first(failed_s: float, tokens_max: int = 100) -> str | None:
        waiting = [movable("a", 0, demand=50, failed_s=failed_s), movable("b", 0, demand=10)]
        return name(choose_waiting(waiting, tokens_max, 100.0, SETTINGS))

    assert first(95.0) == "a"
    assert first(96.0) == "b", "the head failed to go there a moment ago"
    assert first(95.0, 49) == "b", "one that the head blocks"
    assert first(95.0, 9) is None
    assert name(choose_waiting([movable("a", 0, demand=50, failed_s=96.0)], 100, 100.0, SETTINGS)) is None
    assert name(choose_waiting([movable("a", 50)], 100, 100.0, SETTINGS)) is None


def test_it_must_fit_while_it_grows() -> None:
    requests = [movable("a", 300), movable("b", 200)]
    assert name(choose(requests, tokens_max=210)) == "b"
    refused = choose(requests, tokens_max=209)
    assert refused.request is None
    assert "fits" in refused.why


def test_one_that_moves_already_is_not_chosen_again() -> None:
    assert name(choose([movable("a", 100, is_moving=True)])) is None
    assert name(choose([movable("a", 100, is_moving=True), movable("b", 300)])) == "b"
    assert name(choose([])) is None


def test_it_stops_when_enough_has_left_what_is_on_its_way_included() -> None:
    requests = [movable("a", 800), movable("b", 880)]
    assert name(choose(requests, until_freeness=15)) == "a"
    assert name(choose(requests, until_freeness=10)) is None
    assert name(choose(requests, until_freeness=15, leaving=880, leaving_requests=1)) is None
    assert name(choose(requests, until_freeness=15, head_demand=500)) == "a"


def test_one_that_drains_gives_everything() -> None:
    assert name(choose([movable("a", 1)], until_freeness=-5, is_draining=True)) == "a"


def test_a_class_is_not_pushed_away_by_its_own_headroom() -> None:
    high = [movable("a", 900, execution=1), movable("b", 720, execution=1)]
    assert load(high).classes[0].headroom == 100
    assert name(choose(high, until_freeness=3)) is None, "(1700 - 1620) / 2 is 40 without the headroom"
    assert name(choose([*high, movable("c", 20)], until_freeness=3)) == "c", "the others do go"
    assert name(choose(high, until_freeness=41)) == "b"


def test_of_the_headroom_only_what_the_scheduler_grants_pushes_others_away() -> None:
    requests = [movable("a", 900, execution=1), movable("b", 720)]
    assert name(choose(requests, until_freeness=3)) == "b", "(1700 - 1620 - 100) / 2 is -10"
    assert name(choose(requests, until_freeness=3, headroom_max=75)) == "b", "(1700 - 1620 - 75) / 2 is 2.5"
    assert name(choose(requests, until_freeness=3, headroom_max=74)) is None, "it is 3"


def test_headroom_of_one_that_only_waits_pushes_nobody() -> None:
    requests = [movable("a", 300), movable("b", 200)]
    assert name(choose(requests, until_freeness=3, head_demand=100)) is None


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(0, 2), st.booleans(), st.booleans()), max_size=8),
    st.integers(0, 600),
)
def test_whatever_runs_there(rows: list[tuple[int, int, bool, bool]], tokens_max: int) -> None:
    requests = [
        movable(f"r{index}", tokens, execution, moved_s=99.0 if recent else None, is_moving=moving)
        for index, (tokens, execution, recent, moving) in enumerate(rows)
    ]
    able = [item for item in requests if not item.is_moving and item.tokens + SETTINGS.growth <= tokens_max]
    choice = choose(requests, tokens_max)
    assert (choice.request is None) == (not able)
    if choice.request is not None:
        assert choice.request in able
        lowest = min(USAGE.class_of(item.execution).execution for item in able)
        assert USAGE.class_of(choice.request.execution).execution == lowest
