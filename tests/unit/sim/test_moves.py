"""Moves of requests: what the contract suite can't see from outside, or can't bring about."""

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest

from meshift.backends.base import MoveKey, MoveRefused, Refusal
from meshift.backends.sim import SimEngine
from meshift.kv_memory.transport import MemoryTransport
from meshift.schemas.requests import FinishReason
from meshift.services.simulation import virtual_time
from tests.unit.sim.kit import PLAIN, WIDE, Duo, Wire, arrival, make_request, now_ns, undisturbed


@pytest.mark.parametrize("verify", [False, True])
def test_kv_that_changed_on_the_way_gives_other_tokens(verify: bool) -> None:
    async def main() -> None:
        duo = Duo()
        duo.source = SimEngine(PLAIN, transport=MemoryTransport(duo.fabric, "s"), verify_moves=verify)
        await duo.start()
        request = make_request(20, 40)
        whole = await undisturbed(request)
        key = await duo.running(request)
        begun = await duo.source.begin_move(key)
        reserved = await duo.reserve(key, begun.tokens, 96)
        frozen = await duo.source.freeze(key, 0, reserved)
        # Somebody writes zeros over it.
        await Wire(duo, key, reserved.targets[0]).send((0, 5), bytes(20), watermark=frozen.computed)
        if verify:
            with pytest.raises(MoveRefused, match="not what was sent") as caught:
                await duo.commit(key, frozen, arrival(request, key, frozen))
            assert caught.value.refusal is Refusal.BROKEN
            await duo.destination.abort(key)
            await duo.source.resume(key, 1)
            await duo.whole()
            assert duo.before.tokens[request.key] == whole
            return
        await duo.commit(key, frozen, arrival(request, key, frozen))
        await duo.source.release(key)
        await duo.whole()
        before = duo.before.tokens[request.key]
        assert before == whole[: len(before)]
        assert duo.after.tokens[key.destination] != whole[len(before) :]

    virtual_time.run(main())


def test_kv_that_did_not_arrive_is_not_committed() -> None:
    async def main() -> None:
        duo = await Duo().start()
        request = make_request(20, 40)
        key = await duo.running(request)
        begun = await duo.source.begin_move(key)
        reserved = await duo.reserve(key, begun.tokens, 96)
        # A gap: the first round is left out.
        frozen = await duo.source.freeze(key, 10, reserved)
        with pytest.raises(MoveRefused, match="0 of 21 tokens applied") as caught:
            await duo.commit(key, frozen, arrival(request, key, frozen))
        assert caught.value.refusal is Refusal.BROKEN
        await duo.destination.abort(key)
        await duo.source.resume(key, 1)
        await duo.whole()

    virtual_time.run(main())


def test_a_wrong_output_gives_other_tokens() -> None:
    async def main() -> None:
        duo = await Duo().start()
        request = make_request(20, 40)
        whole = await undisturbed(request)
        key = await duo.running(request)
        frozen = await duo.up_to_commit(key)
        wrong = replace(frozen, output=(frozen.output[0] + 1, *frozen.output[1:]))
        await duo.commit(key, wrong, arrival(request, key, wrong))
        await duo.source.release(key)
        await duo.whole()
        assert duo.after.tokens[key.destination] != whole[len(frozen.output) :]

    virtual_time.run(main())


def test_what_the_destination_refuses_to_commit() -> None:
    async def main() -> None:
        duo = await Duo().start()
        request = make_request(20, 40)
        whole = await undisturbed(request)
        key = await duo.running(request)
        frozen = await duo.up_to_commit(key, slots=48)
        right = arrival(request, key, frozen)
        refused = [
            (replace(frozen, computed=frozen.computed - 1), right),
            (replace(frozen, output=frozen.output[:-1]), right),
            (replace(frozen, state=b"{}"), right),
            (replace(frozen, state=b"\xff"), right),
            (frozen, replace(right, key=request.key)),
            (frozen, replace(right, output=(1, 2))),
            (frozen, replace(right, sampling=right.sampling.model_copy(update={"max_new_tokens": 1_000}))),
            (frozen, replace(right, sampling=right.sampling.model_copy(update={"max_new_tokens": 1}))),
            (replace(frozen, computed=frozen.computed + 100), replace(right, prompt=[*request.prompt, *[1] * 100])),
        ]
        for wrong_frozen, wrong_request in refused:
            with pytest.raises(MoveRefused):
                await duo.commit(key, wrong_frozen, wrong_request)
        # Nothing has changed by that.
        await duo.destination.check_integrity()
        await duo.commit(key, frozen, right)
        await duo.source.release(key)
        await duo.whole()
        assert duo.before.tokens[request.key] + duo.after.tokens[key.destination] == whole

    virtual_time.run(main())


def test_a_request_that_does_not_fit_the_destination_is_refused() -> None:
    async def main() -> None:
        duo = await Duo(PLAIN, PLAIN.model_copy(update={"capacity": 64})).start()
        request = make_request(20, 100)
        key = await duo.running(request)
        frozen = await duo.up_to_commit(key, slots=64)
        with pytest.raises(MoveRefused):
            await duo.commit(key, frozen, arrival(request, key, frozen))
        await duo.destination.abort(key)
        await duo.source.resume(key, 1)
        await duo.whole()
        assert len(duo.before.tokens[request.key]) == 100

    virtual_time.run(main())


def test_a_preemption_ends_the_move() -> None:
    async def main() -> None:
        duo = await Duo().start()
        older, request = make_request(64, 60), make_request(76, 30)
        duo.source.submit(older)
        await asyncio.sleep(0.001)
        key = await duo.running(request)
        begun = await duo.source.begin_move(key)
        reserved = await duo.reserve(key, begun.tokens, 128, 10.0)
        # While the first round is gathered, the source runs out of pages.
        with pytest.raises(MoveRefused):
            await duo.source.send_delta(key, 0, reserved)
        for call in (duo.source.freeze(key, 0, reserved), duo.source.send_delta(key, 0, reserved)):
            with pytest.raises(MoveRefused) as caught:
                await call
            assert caught.value.refusal is Refusal.PREEMPTED
        await duo.destination.abort(key)
        await duo.source.resume(key, 2)
        await duo.source.resume(key, 2)
        await duo.whole()
        # It was queued when it got its new attempt, which its later tokens bear.
        resumed = request.key._replace(attempt=2)
        assert duo.before.ends[resumed].preemptions == 1
        assert len(duo.before.tokens[request.key] + duo.before.tokens[resumed]) == 30

    virtual_time.run(main())


def test_a_preempted_request_can_move_again_later() -> None:
    async def main() -> None:
        duo = await Duo(PLAIN, WIDE).start()
        older, request = make_request(64, 40), make_request(76, 60)
        whole = await undisturbed(request)
        duo.source.submit(older)
        await asyncio.sleep(0.001)
        key = await duo.running(request)
        await duo.source.begin_move(key)
        # Until it was preempted and is back.
        for _ in range(10_000):
            if older.key in duo.before.ends and duo.source.load().running == 1:
                break
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        with pytest.raises(MoveRefused):
            await duo.source.freeze(key, 0, None)
        frozen = await duo.up_to_commit(key, slots=200)
        await duo.commit(key, frozen, arrival(request, key, frozen))
        await duo.source.release(key)
        await duo.whole()
        assert duo.before.tokens[request.key] + duo.after.tokens[key.destination] == whole
        assert duo.after.ends[key.destination].preemptions == 1
        assert duo.after.ends[key.destination].preemption_loss_ns > 0

    virtual_time.run(main())


def test_a_moved_request_keeps_its_admission_time() -> None:
    async def main() -> None:
        duo = await Duo(PLAIN).start()
        old = make_request(30, 60)
        key = await duo.running(old)
        young = make_request(60, 60)
        duo.destination.submit(young)
        await asyncio.sleep(0.2)
        frozen = await duo.up_to_commit(key, slots=64)
        await duo.commit(key, frozen, arrival(old, key, frozen))
        await duo.source.release(key)
        await duo.whole()
        # Both can't grow to their ends there; the one admitted later anywhere gives way.
        assert duo.after.ends[key.destination].preemptions == 0
        assert duo.after.ends[young.key].preemptions == 1

    virtual_time.run(main())


def test_renewing_moves_the_deadline() -> None:
    async def main() -> None:
        duo = await Duo().start()
        key = MoveKey("r", 1, 1)
        for _ in range(5):
            reserved = await duo.reserve(key, [1, 2], 20, 1.0)
            assert reserved.slots == 32
            await asyncio.sleep(0.9)
        assert duo.destination.load().reserved == 32
        await duo.reserve(key, [1, 2], 70, 0.5)
        assert duo.destination.load().reserved == 80
        fewer = await duo.reserve(key, [1, 2], 10, 0.5)
        assert fewer.slots == 80
        await asyncio.sleep(0.6)
        assert duo.destination.load().reserved == 0
        with pytest.raises(MoveRefused, match="ended"):
            await duo.reserve(key, [1, 2], 20, 1.0)

    virtual_time.run(main())


def test_reservations_that_make_no_sense() -> None:
    async def main() -> None:
        duo = await Duo().start()
        with pytest.raises(MoveRefused):
            await duo.reserve(MoveKey("r", 1, 1), [1, 2, 3], 2, 1.0)
        request = make_request(10, 5)
        duo.destination.submit(request)
        with pytest.raises(MoveRefused):
            await duo.reserve(MoveKey(request.key.request_id, 1, 0), [1], 2, 1.0)
        await duo.whole()

    virtual_time.run(main())


def test_freezing_twice_is_refused() -> None:
    async def main() -> None:
        duo = await Duo().start()
        key = await duo.running(make_request(20, 40))
        await duo.source.begin_move(key)
        first = asyncio.ensure_future(duo.source.freeze(key, 0, None))
        await asyncio.sleep(0)
        with pytest.raises(MoveRefused):
            await duo.source.freeze(key, 0, None)
        await first
        with pytest.raises(MoveRefused):
            await duo.source.freeze(key, 0, None)
        await duo.source.resume(key, 1)
        await duo.whole()

    virtual_time.run(main())


def test_a_freeze_that_nobody_waits_for_does_not_happen() -> None:
    async def main() -> None:
        duo = await Duo().start()
        request = make_request(20, 40)
        key = await duo.running(request)
        await duo.source.begin_move(key)
        freeze = asyncio.ensure_future(duo.source.freeze(key, 0, None))
        await asyncio.sleep(0)
        freeze.cancel()
        await duo.whole()
        assert len(duo.before.tokens[request.key]) == 40

    virtual_time.run(main())


def test_release_before_the_freeze_is_a_bug_of_the_caller() -> None:
    async def main() -> None:
        duo = await Duo().start()
        key = await duo.running(make_request(20, 40))
        await duo.source.begin_move(key)
        with pytest.raises(AssertionError):
            await duo.source.release(key)
        await duo.source.resume(key, 1)
        await duo.whole()

    virtual_time.run(main())


def test_tokens_before_a_resume_bear_the_old_key() -> None:
    async def main() -> None:
        duo = Duo()
        duo.source = SimEngine(PLAIN, transport=MemoryTransport(duo.fabric, "s"), skip_steps=True, emit="edges")
        await duo.start()
        request = make_request(20, 40)
        key = await duo.running(request)
        await duo.source.begin_move(key)
        await asyncio.sleep(0.1)
        seen = len(duo.before.tokens[request.key])
        await duo.source.resume(key, 7)
        # Delivered before `resume` returns, so that a worker can change the key it expects.
        assert len(duo.before.tokens[request.key]) == seen + 10
        at = now_ns()
        await duo.whole()
        resumed = request.key._replace(attempt=7)
        assert len(duo.before.tokens[resumed]) == 40 - seen - 10
        assert min(duo.before.times[resumed]) > at
        assert duo.before.ends[resumed].reason == FinishReason.LENGTH
        assert request.key not in duo.before.ends
        duo.source.cancel(resumed)

    virtual_time.run(main())


def test_a_frozen_request_is_not_preempted_and_can_be_cancelled() -> None:
    async def main() -> None:
        duo = await Duo().start()
        other, request = make_request(60, 60), make_request(60, 30)
        duo.source.submit(other)
        key = await duo.running(request)
        await duo.source.begin_move(key)
        await duo.source.freeze(key, 0, None)
        await asyncio.sleep(1.0)
        load = duo.source.load()
        assert load.used >= 60
        await duo.source.check_integrity()
        duo.source.cancel(request.key)
        await duo.source.release(key)
        await duo.source.resume(key, 2)
        await duo.whole()
        assert duo.before.ends[request.key].reason == FinishReason.CANCELLED

    virtual_time.run(main())


def test_a_request_in_prefill_is_busy() -> None:
    async def main() -> None:
        duo = await Duo().start()
        request = make_request(20, 40)
        key = MoveKey(request.key.request_id, 1, 1)
        duo.source.submit(request)
        begun = await duo.source.begin_move(key)
        assert begun.tokens == ()
        await asyncio.sleep(0.01)
        # It began to wait, and is computed by now.
        for call in (duo.source.freeze(key, 0, None), duo.source.begin_move(key)):
            with pytest.raises(MoveRefused) as caught:
                await call
            assert caught.value.refusal is Refusal.BUSY
        await duo.source.resume(key, 1)
        with pytest.raises(MoveRefused) as caught:
            await duo.source.begin_move(key)
        assert caught.value.refusal is Refusal.BUSY
        await duo.whole()
        assert len(duo.before.tokens[request.key]) == 40

    virtual_time.run(main())


def test_who_waited_longer_goes_first_at_the_destination() -> None:
    async def main() -> None:
        duo = await Duo().start()
        fillers = [make_request(100, 60), make_request(100, 60)]
        for engine, filler in zip((duo.source, duo.destination), fillers, strict=True):
            engine.submit(filler)
        await asyncio.sleep(0.2)
        moved, stays = make_request(60, 5), make_request(60, 5)
        duo.source.submit(moved)
        await asyncio.sleep(0.01)
        duo.destination.submit(stays)
        key = MoveKey(moved.key.request_id, 1, 1)
        await duo.source.begin_move(key)
        await duo.reserve(key, (), 0)
        frozen = await duo.source.freeze(key, 0, None)
        assert duo.source.load().waiting == 0
        await duo.commit(key, frozen, arrival(moved, key, frozen))
        await duo.source.release(key)
        assert duo.destination.load().waiting == 2
        duo.destination.cancel(fillers[1].key)
        await duo.whole()
        assert duo.after.times[key.destination][0] <= duo.after.times[stays.key][0]
        assert duo.before.tokens.keys() == {fillers[0].key}

    virtual_time.run(main())


def test_a_move_of_state_only_slows_nothing_down() -> None:
    async def main() -> None:
        duo = await Duo(PLAIN.model_copy(update={"copying_slowdown_percent": 10})).start()
        stays, request = make_request(10, 60), make_request(200 - 60, 5)
        duo.source.submit(stays)
        await asyncio.sleep(0.1)
        duo.source.submit(request)
        key = MoveKey(request.key.request_id, 1, 1)
        await duo.source.begin_move(key)
        await duo.reserve(key, (), 0)
        await asyncio.sleep(0.2)
        times = duo.before.times[stays.key]
        assert {end - start for start, end in pairwise(times)} == {10_000_000}
        await duo.destination.abort(key)
        await duo.source.resume(key, 1)
        await duo.whole()

    virtual_time.run(main())
