"""When things happen, to the nanosecond, in scenarios that can be worked out by hand (`PLAIN`: a step of 10 ms, a
prefill of 20 ms plus 1 ms a token, 10 pages of 16 tokens)."""

import asyncio
from itertools import pairwise

import pytest

from meshift.backends.sim import SimEngine, SimParameters
from meshift.backends.sim.work import Emit
from meshift.services.simulation import virtual_time
from tests.unit.sim.kit import MS, PLAIN, Duo, Recorder, make_request, now_ns, started, until_idle

MODES: list[tuple[bool, Emit]] = [(False, "step"), (True, "step"), (True, "edges")]


def test_one_request() -> None:
    async def main() -> None:
        engine, seen = await started()
        request = make_request(30, 4)
        engine.submit(request)
        await until_idle(engine)
        assert seen.times[request.key] == [50 * MS, 60 * MS, 70 * MS, 80 * MS]

    virtual_time.run(main())


def test_step_time_follows_the_batch() -> None:
    async def main() -> None:
        engine, seen = await started(SimParameters())
        first, second = make_request(100, 5), make_request(50, 3)
        engine.submit(first)
        engine.submit(second)
        await until_idle(engine)
        prefill = 20_000_000 + 300_000 * 150 + 5 * (100**2 + 50**2)
        both = [28_000_000 + 2 * 350_000 + 2_200 * (150 + 2 * step) for step in range(2)]
        alone = [28_000_000 + 350_000 + 2_200 * (102 + step) for step in range(2)]
        times = seen.times[first.key]
        assert times[0] == prefill
        assert [end - start for start, end in pairwise(times)] == both + alone
        assert seen.times[second.key] == times[:3]

    virtual_time.run(main())


@pytest.mark.parametrize("mode", MODES)
def test_prefill_goes_before_decode(mode: tuple[bool, Emit]) -> None:
    async def main() -> None:
        engine, seen = await started(skip_steps=mode[0], emit=mode[1])
        first, second = make_request(10, 6), make_request(10, 2)
        engine.submit(first)
        await asyncio.sleep(0.035)
        engine.submit(second)
        await until_idle(engine)
        # First: prefill to 30, a step to 40; then the second's prefill to 70, and steps of both.
        assert seen.times[second.key] == [70 * MS, 80 * MS]
        assert seen.times[first.key][-1] == 110 * MS

    virtual_time.run(main())


def test_requests_of_one_instant_share_a_prefill() -> None:
    async def main() -> None:
        engine, seen = await started()
        requests = [make_request(10, 1) for _ in range(3)]
        for request in requests:
            engine.submit(request)
            await asyncio.sleep(0)
        await until_idle(engine)
        assert [seen.times[request.key] for request in requests] == [[50 * MS]] * 3

    virtual_time.run(main())


def test_a_prefill_batch_has_a_bound_and_a_longer_prompt_goes_alone() -> None:
    async def main() -> None:
        engine, seen = await started(PLAIN.model_copy(update={"prefill_tokens_max": 25}))
        sizes = [10, 15, 1, 40, 5]
        requests = [make_request(size, 1) for size in sizes]
        for request in requests:
            engine.submit(request)
        await until_idle(engine)
        ends = [seen.times[request.key][0] // MS for request in requests]
        assert ends == [45, 45, 66, 126, 151]

    virtual_time.run(main())


def test_the_head_blocks_those_behind_it() -> None:
    async def main() -> None:
        engine, seen = await started()
        running, big, small = make_request(64, 8), make_request(128, 1), make_request(1, 1)
        for request in (running, big, small):
            engine.submit(request)
        await until_idle(engine)
        end = seen.times[running.key][-1]
        assert seen.times[big.key] == seen.times[small.key] == [end + (20 + 128 + 1) * MS]

    virtual_time.run(main())


def test_higher_priority_goes_first() -> None:
    async def main() -> None:
        engine, seen = await started()
        running = make_request(64, 8)
        engine.submit(running)
        await asyncio.sleep(0.001)
        low, high = make_request(128, 1), make_request(128, 1, priority=1)
        engine.submit(low)
        engine.submit(high)
        await until_idle(engine)
        assert seen.times[high.key] < seen.times[low.key]

    virtual_time.run(main())


@pytest.mark.parametrize("mode", MODES)
def test_preemption_takes_the_newest_and_recomputes(mode: tuple[bool, Emit]) -> None:
    async def main() -> None:
        engine, seen = await started(skip_steps=mode[0], emit=mode[1])
        older, newer = make_request(64, 33), make_request(80, 20)
        engine.submit(older)
        await asyncio.sleep(0.001)
        engine.submit(newer)
        await until_idle(engine)
        # Older's prefill to 84, newer's to 184: 4 + 5 pages. Both are full, so the next step wants 2 where 1 is free.
        # Newer is preempted at once with 1 token out, and older gives its 32 others alone, to 504.
        assert seen.times[older.key][-1] == 504 * MS
        assert seen.ends[older.key].preemptions == 0
        # Then 81 tokens are computed again, which gives the next one.
        back = (504 + 20 + 81) * MS
        assert seen.times[newer.key][0] == 184 * MS
        if mode == (False, "step"):
            assert seen.times[newer.key][1] == back
        assert seen.times[newer.key][-1] == back + 18 * 10 * MS
        finish = seen.ends[newer.key]
        assert (finish.preemptions, finish.preemption_loss_ns) == (1, back - 184 * MS)

    virtual_time.run(main())


def test_preemption_changes_no_token() -> None:
    async def main() -> None:
        engine, seen = await started()
        requests = [make_request([number, 2, 3], 60) for number in range(8)]
        for request in requests:
            engine.submit(request)
        await until_idle(engine)
        assert sum(seen.ends[request.key].preemptions for request in requests) >= 3
        alone, heard = await started()
        for request in requests:
            alone.submit(request)
            await until_idle(alone)
            assert heard.tokens[request.key] == seen.tokens[request.key]

    virtual_time.run(main())


@pytest.mark.parametrize("mode", MODES)
def test_load_is_exact_amid_a_segment(mode: tuple[bool, Emit]) -> None:
    async def main() -> None:
        engine, _ = await started(skip_steps=mode[0], emit=mode[1])
        engine.submit(make_request(10, 40))
        used = []
        for _ in range(42):
            await asyncio.sleep(0.010)
            used.append(engine.load().used)
        # The prompt's page from the start; slots 16, 32 and 48 are written by the steps that begin at 90, 250 and
        # 410 ms, the last one.
        assert used[:8] == [16] * 8
        assert used[8:24] == [32] * 16
        assert used[24:40] == [48] * 16
        assert used[40:] == [64, 0]
        await until_idle(engine)

    virtual_time.run(main())


def test_cancel_takes_effect_when_the_step_ends() -> None:
    async def main() -> None:
        for skip_steps in (False, True):
            engine, seen = await started(skip_steps=skip_steps, emit="edges")
            begin = now_ns()
            request = make_request(10, 100)
            engine.submit(request)
            await asyncio.sleep(0.055)
            engine.cancel(request.key)
            await until_idle(engine)
            assert seen.times[request.key][-1] - begin == 60 * MS
            assert len(seen.tokens[request.key]) == 4
            assert seen.ends[request.key].reason == "cancelled"

    virtual_time.run(main())


def test_cold_start_takes_its_time() -> None:
    async def main() -> None:
        engine = SimEngine(PLAIN.model_copy(update={"cold_start_ns": 30_000 * MS}))
        await engine.start(Recorder())
        assert now_ns() == 30_000 * MS

    virtual_time.run(main())


def test_a_request_alone_gives_way_to_a_reservation_and_comes_back() -> None:
    async def main() -> None:
        duo = await Duo().start()
        request = make_request(100, 40)
        key = await duo.running(request)
        incoming = key.__class__("other", 1, 1)
        # 7 of 10 pages are its; the rest is promised away for a while, and it can't grow.
        await duo.source.reserve(incoming, duo.layout, [1], 48, 0.5)
        await asyncio.sleep(0.3)
        assert duo.source.load().running == 0
        assert duo.source.load().waiting == 1
        await duo.whole()
        assert len(duo.before.tokens[request.key]) == 40
        assert duo.before.ends[request.key].preemptions == 1

    virtual_time.run(main())


def test_steps_are_longer_while_copying_out_and_in() -> None:
    async def main() -> None:
        duo = await Duo(PLAIN.model_copy(update={"copying_slowdown_percent": 10})).start()
        stays = make_request(10, 60)
        duo.destination.submit(stays)
        request = make_request(10, 60)
        key = await duo.running(request)
        begun = await duo.source.begin_move(key)
        await duo.reserve(key, begun.tokens, 64, 10.0)
        await asyncio.sleep(0.1)
        await duo.destination.abort(key)
        await duo.source.resume(key, 2)
        await duo.whole()
        resumed = request.key._replace(attempt=2)
        for times in (duo.after.times[stays.key], duo.before.times[request.key] + duo.before.times[resumed]):
            gaps = [end - start for start, end in pairwise(times)]
            assert set(gaps) == {10 * MS, 11 * MS}
            assert 8 <= gaps.count(11 * MS) <= 10
            # One stretch of slow steps, and the step on its way is left alone at both ends.
            assert [gap for gap, following in pairwise(gaps) if gap != following] == [10 * MS, 11 * MS]

    virtual_time.run(main())


def test_a_move_stops_the_request_for_the_cutover_time() -> None:
    async def main() -> None:
        duo = await Duo().start()
        request = make_request(30, 100)
        key = await duo.running(request)
        begun = await duo.source.begin_move(key)
        reserved = await duo.reserve(key, begun.tokens, 96, 10.0)
        before = now_ns()
        sent = await duo.source.send_delta(key, 0, reserved)
        assert now_ns() - before == sent.gather_ns == (5 + 30) * MS
        frozen = await duo.source.freeze(key, sent.end, reserved)
        # What came meanwhile is less than the cutover costs.
        assert now_ns() - frozen.frozen_ns == 25 * MS
        await duo.source.resume(key, 1)
        await duo.destination.abort(key)
        await duo.whole()

    virtual_time.run(main())


def test_a_blocking_move_takes_as_long_as_its_bytes() -> None:
    async def main() -> None:
        duo = await Duo().start()
        key = await duo.running(make_request(100, 20))
        begun = await duo.source.begin_move(key)
        reserved = await duo.reserve(key, begun.tokens, 128, 10.0)
        frozen = await duo.source.freeze(key, 0, reserved)
        assert now_ns() - frozen.frozen_ns == (5 + frozen.computed) * MS
        await duo.source.resume(key, 1)
        await duo.destination.abort(key)
        await duo.whole()

    virtual_time.run(main())


def test_two_copies_share_the_bandwidth() -> None:
    async def main() -> None:
        duo = await Duo(PLAIN.model_copy(update={"capacity": 320})).start()
        first, second = make_request(30, 60), make_request(40, 60)
        duo.source.submit(first)
        second_key = await duo.running(second)
        first_key = second_key.__class__(first.key.request_id, 1, 1)
        rounds = []
        for key in (first_key, second_key):
            begun = await duo.source.begin_move(key)
            reserved = await duo.reserve(key, begun.tokens, 96, 10.0)
            rounds.append(duo.source.send_delta(key, 0, reserved))
        begin = now_ns()
        await asyncio.gather(*rounds)
        assert now_ns() - begin == (5 + 30 + 5 + 40) * MS
        for key in (first_key, second_key):
            await duo.destination.abort(key)
            await duo.source.resume(key, 1)
        await duo.whole()

    virtual_time.run(main())
