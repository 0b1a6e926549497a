"""A rank's gate and its claim."""

import asyncio
import threading

import pytest

from meshift.kv_memory.transport.distributed.claims import Claims
from meshift.kv_memory.transport.distributed.gate import Gate

TIMEOUT_S = 10.0


def test_inference_shares_the_gate_with_itself_alone() -> None:
    gate = Gate()
    gate.enter()
    with gate.inference():
        assert not gate.try_lock()
    assert not gate.try_lock()
    gate.leave()
    assert gate.try_lock()
    assert not gate.try_lock()
    assert gate.locked
    gate.unlock()
    assert gate.try_lock()


def test_inference_waits_for_who_is_inside_and_goes_first_then() -> None:
    gate, through, leave = Gate(), threading.Event(), threading.Event()
    assert gate.try_lock()

    def infer() -> None:
        with gate.inference(timeout_s=TIMEOUT_S):
            through.set()
            leave.wait(TIMEOUT_S)

    thread = threading.Thread(target=infer)
    thread.start()
    gate.unlock()
    # Whether it has come yet or not: it never finds the gate locked twice.
    assert through.wait(TIMEOUT_S)
    assert not gate.try_lock()
    leave.set()
    thread.join(TIMEOUT_S)
    assert gate.try_lock()


def test_inference_has_a_deadline() -> None:
    gate = Gate()
    assert gate.try_lock()
    with pytest.raises(TimeoutError, match="in the gate"):
        gate.enter(timeout_s=0.0)
    gate.unlock()
    # Who gave up doesn't count as waiting.
    assert gate.try_lock()


def test_the_last_to_leave_tells_the_watcher_once() -> None:
    gate, told = Gate(), []
    gate.enter()
    gate.enter()
    gate.watch(lambda: told.append("free"))
    gate.leave()
    assert not told
    gate.leave()
    assert told == ["free"]
    gate.enter()
    gate.leave()
    assert told == ["free"]
    gate.watch(lambda: told.append("at once"))
    assert told == ["free", "at once"]


def test_a_watcher_may_leave() -> None:
    gate = Gate()
    gate.enter()
    gate.watch(lambda: pytest.fail("it has left"))
    gate.unwatch()
    gate.unwatch()
    gate.leave()


async def test_claims_are_given_in_order() -> None:
    claims, told = Claims(), []
    for name in ("first", "second", "third"):
        claims.take(name, lambda name=name: told.append(name))  # type: ignore[misc]
    await asyncio.sleep(0)
    assert (told, claims.holder) == (["first"], "first")
    claims.give_back("second")
    claims.give_back("first")
    claims.give_back("first")
    await asyncio.sleep(0)
    assert (told, claims.holder) == (["first", "third"], "third")
    claims.give_back("third")
    assert claims.holder is None


async def test_who_leaves_before_it_is_told_is_not_told() -> None:
    claims, told = Claims(), []
    claims.take("first", lambda: told.append("first"))
    claims.take("second", lambda: told.append("second"))
    claims.give_back("first")
    await asyncio.sleep(0)
    assert told == ["second"]
