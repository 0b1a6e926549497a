"""What every movable engine must do when a request moves: exact tokens, and memory back on every path."""

import asyncio
from collections.abc import Awaitable
from dataclasses import replace

import pytest

from meshift.backends.base import EngineRequest, MoveRefused, Refusal
from meshift.schemas.requests import FinishReason
from tests.contract.engine_kit import (
    MovePair,
    Mover,
    Rig,
    Stream,
    conserved,
    layout_of,
    movable,
    starve,
    watch_conservation,
)

PHASES = ("begin", "reserve", "copy", "copies", "freeze")
STATE_PHASES = ("begin", "reserve", "freeze")


async def drive_to(mover: Mover, phase: str) -> None:
    """The move up to the end of `phase`."""
    await mover.begin()
    if phase == "begin":
        return
    await mover.reserve()
    if phase == "reserve":
        return
    await mover.copy()
    if phase == "copy":
        return
    await mover.reserve(mover.next + mover.pair.headroom)
    if phase == "copies":
        await mover.copy()
        return
    await mover.freeze()


async def drive_state_to(mover: Mover, phase: str) -> None:
    """The same for a move of state only."""
    await mover.begin()
    if phase == "begin":
        return
    await mover.reserve(0)
    if phase == "reserve":
        return
    await mover.freeze(state_only=True)


async def refused(call: Awaitable[object], *refusals: Refusal) -> None:
    """Await it; it must be refused for one of these reasons."""
    with pytest.raises(MoveRefused) as caught:
        await call
    assert caught.value.refusal in refusals, caught.value


class MoveStarts:
    """How the tests get requests that run or wait."""

    async def start_all(self, *pairs: MovePair) -> list[tuple[list[int], Mover, Stream]]:
        """For each pair a request: the tokens of an undisturbed run, and the same one running at the source."""
        prompts = [pair.source.prompt() for pair in pairs]
        undisturbed = [
            await pair.source.generate(pair.source.request(prompt, max_new_tokens=pair.source.long_tokens))
            for pair, prompt in zip(pairs, prompts, strict=True)
        ]
        movers = [
            Mover(pair, pair.source.request(prompt, max_new_tokens=pair.source.long_tokens))
            for pair, prompt in zip(pairs, prompts, strict=True)
        ]
        streams = [mover.pair.source.submit(mover.request) for mover in movers]
        for mover, stream in zip(movers, streams, strict=True):
            await mover.pair.source.produced(stream, 1)
        return list(zip(undisturbed, movers, streams, strict=True))

    async def start(self, pair: MovePair) -> tuple[list[int], Mover, Stream]:
        """The same for one request."""
        (started,) = await self.start_all(pair)
        return started

    async def start_waiting(self, pair: MovePair) -> tuple[list[int], Mover, Stream]:
        """One that waits at the source until `free` is called."""
        source = pair.source
        prompt = source.prompt(source.waiter_tokens)
        undisturbed = await source.generate(source.request(prompt))
        fillers = [source.submit(self.filler(source, count)) for count in source.filler_prompts]
        for filler in fillers:
            await source.produced(filler, 1)
        mover = Mover(pair, source.request(prompt))
        return undisturbed, mover, source.submit(mover.request)

    @staticmethod
    def filler(rig: Rig, prompt_tokens: int) -> EngineRequest:
        """A request that takes much room."""
        return rig.request(rig.prompt(prompt_tokens), max_new_tokens=rig.long_tokens)

    @staticmethod
    def free(rig: Rig, *kept: Stream) -> None:
        """End the fillers."""
        for key, stream in rig.listener.streams.items():
            if stream.finish is None and all(stream is not other for other in kept):
                rig.engine.cancel(key)


class EngineMoveEssentials(MoveStarts):
    """What depends on how an engine steps: for each way to step. Needs the fixture `pair: MovePair`, which calls
    `MovePair.settle` afterwards."""

    async def test_several_rounds(self, pair: MovePair) -> None:
        undisturbed, mover, before = await self.start(pair)
        await mover.begin()
        starts = []
        for count in (2, 5, 9, 14):
            await pair.source.produced(before, count)
            await mover.reserve(len(mover.request.prompt) + count + pair.headroom)
            starts.append((await mover.copy()).start)
        _, after = await mover.finish()
        await pair.destination.finished(after)
        assert starts == sorted(starts)
        assert before.tokens + after.tokens == undisturbed

    async def test_blocking(self, pair: MovePair) -> None:
        undisturbed, mover, before = await self.start(pair)
        await mover.begin()
        _, after = await mover.finish()
        await pair.destination.finished(after)
        assert before.tokens + after.tokens == undisturbed

    async def test_there_and_back(self, pair: MovePair) -> None:
        undisturbed, mover, before = await self.start(pair)
        request, there = await mover.run()
        await pair.destination.produced(there, 2)
        back_mover = Mover(pair.reversed(), request)
        _, back = await back_mover.run()
        await pair.source.finished(back)
        assert before.tokens + there.tokens + back.tokens == undisturbed

    async def test_under_load_both_directions(self, pair: MovePair) -> None:
        (whole, out, before), (other_whole, back, other_before) = await self.start_all(pair, pair.reversed())
        others = [(rig, rig.request()) for rig in (pair.source, pair.destination) for _ in range(rig.concurrency)]
        streams = [rig.submit(request) for rig, request in others]
        (_, after), (_, other_after) = await asyncio.gather(out.run(), back.run())
        count = pair.source.concurrency
        await pair.destination.finished(after, *streams[count:])
        await pair.source.finished(other_after, *streams[:count])
        assert before.tokens + after.tokens == whole
        assert other_before.tokens + other_after.tokens == other_whole
        assert after.tokens
        assert other_after.tokens
        for index in (0, count):
            rig, request = others[index]
            assert streams[index].tokens == await rig.generate(rig.request(request.prompt))

    async def test_many_moves_at_once(self, pair: MovePair) -> None:
        count = pair.source.long_moves
        started = await self.start_all(*[pair] * count, *[pair.reversed()] * count)
        arrived = await asyncio.gather(*(mover.run() for _, mover, _ in started))
        await pair.destination.finished(*(after for _, after in arrived[:count]))
        await pair.source.finished(*(after for _, after in arrived[count:]))
        for (undisturbed, _, before), (_, after) in zip(started, arrived, strict=True):
            assert before.tokens + after.tokens == undisturbed

    async def test_a_given_up_move_can_be_tried_again(self, pair: MovePair) -> None:
        undisturbed, mover, before = await self.start(pair)
        await drive_to(mover, "freeze")
        request = await mover.resume(attempt=2)
        await pair.source.produced(before, len(before.tokens) + 1)
        _, after = await Mover(pair, request).run()
        await pair.destination.finished(after)
        assert before.tokens + after.tokens == undisturbed

    async def test_a_commit_that_is_refused_changes_nothing(self, pair: MovePair) -> None:
        undisturbed, mover, before = await self.start(pair)
        await drive_to(mover, "freeze")
        whole = mover.frozen
        assert whole is not None
        # Of a verifying engine: what arrived isn't what was sent. Of any: nobody knows tokens that nobody sent.
        broken = replace(whole, kv_hashes=tuple(value ^ 1 for value in whole.kv_hashes))
        mover.frozen = broken if whole.kv_hashes else replace(whole, computed=whole.computed + 1)
        await refused(mover.commit(), Refusal.BROKEN, Refusal.INCOMPATIBLE)
        mover.frozen = whole
        _, after = await mover.commit()
        await mover.release()
        await pair.destination.finished(after)
        assert before.tokens + after.tokens == undisturbed

    async def test_a_reservation_expires(self, pair: MovePair) -> None:
        undisturbed, mover, stream = await self.start(pair)
        await mover.begin()
        await mover.reserve(deadline_s=pair.short_reservation_s)
        assert pair.destination.engine.load().reserved > 0
        await pair.destination.eventually(pair.destination.idle, "the end of a reservation")
        await refused(mover.copy(), Refusal.BROKEN, Refusal.UNKNOWN)
        await mover.resume()
        await pair.source.finished(stream)
        assert stream.tokens == undisturbed

    async def test_without_headroom(self, pair: MovePair) -> None:
        undisturbed, mover, before = await self.start(pair)
        begun = await mover.begin()
        reserved = await mover.reserve(slots=len(begun.tokens))
        # Until it has outgrown what is reserved: a round sends what fits, a freeze is refused and changes nothing.
        await pair.source.produced(before, reserved.slots - len(mover.request.prompt) + 3)
        assert (await mover.copy()).end == reserved.slots
        await refused(movable(pair.source).freeze(mover.key, mover.next, reserved), Refusal.NO_ROOM)
        await pair.source.produced(before, len(before.tokens) + 2)
        _, after = await mover.finish()
        await pair.destination.finished(after)
        assert before.tokens + after.tokens == undisturbed

    @pytest.mark.parametrize("call", ["copy", "freeze"])
    async def test_cancelled_during(self, pair: MovePair, call: str) -> None:
        _, mover, stream = await self.start(pair)
        await mover.begin()
        await mover.reserve(len(mover.request.prompt) + 2 * pair.headroom)
        running = asyncio.ensure_future(mover.copy() if call == "copy" else mover.freeze())
        await asyncio.sleep(0)
        pair.source.engine.cancel(mover.request.key)
        # Which comes first is the engine's business; if it froze nevertheless, it is cancelled as it is.
        (outcome,) = await asyncio.gather(running, return_exceptions=True)
        assert not isinstance(outcome, BaseException) or isinstance(outcome, MoveRefused)
        await pair.source.finished(stream)
        assert stream.finish is not None
        assert stream.finish.reason == FinishReason.CANCELLED
        await movable(pair.destination).abort(mover.key)
        await movable(pair.source).resume(mover.key, 2)

    async def test_cancelled_right_after_the_commit(self, pair: MovePair) -> None:
        _, mover, _ = await self.start(pair)
        await drive_to(mover, "freeze")
        request, after = await mover.commit()
        pair.destination.engine.cancel(request.key)
        await mover.release()
        await pair.destination.finished(after)
        assert after.finish is not None
        assert after.finish.reason == FinishReason.CANCELLED

    async def test_recomputed_there_it_moves_live(self, pair: MovePair) -> None:
        undisturbed, mover, before = await self.start(pair)
        request, there = await mover.run_state_only()
        await pair.destination.produced(there, 2)
        _, back = await Mover(pair.reversed(), request).run()
        await pair.source.finished(back)
        assert before.tokens + there.tokens + back.tokens == undisturbed

    async def test_a_waiting_request_moves(self, pair: MovePair) -> None:
        undisturbed, mover, before = await self.start_waiting(pair)
        begun = await mover.begin()
        assert begun.tokens == ()
        assert begun.growth_max == mover.request.sampling.max_new_tokens
        await mover.reserve(0)
        frozen = await mover.freeze()
        assert frozen.output == ()
        _, after = await mover.commit()
        await mover.release()
        await pair.source.eventually(lambda: not pair.source.engine.load().waiting, "an empty queue")
        await pair.destination.finished(after)
        assert before.tokens == []
        assert after.tokens == undisturbed


class EngineMoveSuite(EngineMoveEssentials):
    """All of it."""

    async def test_a_move_is_exact(self, pair: MovePair) -> None:
        wrong = [*watch_conservation(pair.source), *watch_conservation(pair.destination)]
        undisturbed, mover, before = await self.start(pair)
        _, after = await mover.run()
        await pair.source.eventually(pair.source.idle, "the source's memory")
        await pair.destination.finished(after)
        assert before.finish is None
        assert before.tokens + after.tokens == undisturbed
        assert after.tokens
        assert after.finish is not None
        assert after.finish.reason == FinishReason.LENGTH
        assert wrong == []

    async def test_log_probabilities_go_on(self, pair: MovePair) -> None:
        request = pair.source.request(max_new_tokens=pair.source.long_tokens, logprobs=2)
        before = pair.source.submit(request)
        await pair.source.produced(before, 1)
        _, after = await Mover(pair, request).run()
        await pair.destination.finished(after)
        for stream in (before, after):
            assert len(stream.logprobs) == len(stream.tokens) > 0

    # ---- giving up

    @pytest.mark.parametrize("phase", PHASES)
    async def test_give_up_after(self, pair: MovePair, phase: str) -> None:
        undisturbed, mover, stream = await self.start(pair)
        await drive_to(mover, phase)
        await mover.resume()
        await pair.destination.eventually(pair.destination.idle, "the destination's memory")
        await pair.source.finished(stream)
        assert stream.tokens == undisturbed

    @pytest.mark.parametrize("phase", PHASES)
    async def test_resume_with_a_new_attempt(self, pair: MovePair, phase: str) -> None:
        undisturbed, mover, stream = await self.start(pair)
        await drive_to(mover, phase)
        request = await mover.resume(attempt=2)
        assert request.key.attempt == 2
        await movable(pair.source).resume(mover.key, 2)
        await pair.source.finished(stream)
        assert stream.tokens == undisturbed

    async def test_a_new_attempt_without_a_move(self, pair: MovePair) -> None:
        undisturbed, mover, before = await self.start(pair)
        request = await mover.resume(attempt=2)
        _, after = await Mover(pair, request).run()
        await pair.destination.finished(after)
        assert request.key.attempt == 2
        assert before.tokens + after.tokens == undisturbed

    async def test_commit_after_abort_is_refused(self, pair: MovePair) -> None:
        undisturbed, mover, stream = await self.start(pair)
        await drive_to(mover, "freeze")
        await movable(pair.destination).abort(mover.key)
        await movable(pair.destination).abort(mover.key)
        await refused(mover.commit(), Refusal.UNKNOWN)
        await mover.resume()
        await pair.source.finished(stream)
        assert stream.tokens == undisturbed

    async def test_abort_before_reserve_refuses_both(self, pair: MovePair) -> None:
        _, mover, _ = await self.start(pair)
        await mover.begin()
        await movable(pair.destination).abort(mover.key)
        await refused(mover.reserve(), Refusal.UNKNOWN)
        await mover.resume()

    async def test_commit_without_reservation_is_refused(self, pair: MovePair) -> None:
        undisturbed, mover, stream = await self.start(pair)
        await mover.begin()
        await mover.freeze(state_only=True)
        await refused(mover.commit(), Refusal.UNKNOWN)
        await mover.resume()
        await pair.source.finished(stream)
        assert stream.tokens == undisturbed

    async def test_commit_happens_once(self, pair: MovePair) -> None:
        undisturbed, mover, before = await self.start(pair)
        _, after = await mover.run()
        assert mover.frozen is not None
        again = movable(pair.destination).commit(mover.key, mover.frozen, mover.arrival(), pair.destination.timeout_s)
        await refused(again, Refusal.UNKNOWN)
        await pair.destination.finished(after)
        assert before.tokens + after.tokens == undisturbed

    async def test_release_and_resume_are_idempotent(self, pair: MovePair) -> None:
        undisturbed, mover, before = await self.start(pair)
        request, after = await mover.run()
        await movable(pair.source).release(mover.key)
        await movable(pair.source).resume(mover.key, 2)
        await movable(pair.destination).abort(mover.key)
        await pair.destination.finished(after)
        assert request.key == mover.key.destination
        assert before.tokens + after.tokens == undisturbed

    # ---- reservations

    async def test_no_room(self, pair: MovePair) -> None:
        _, mover, _ = await self.start(pair)
        await mover.begin()
        await refused(mover.reserve(slots=pair.destination.info.capacity + 1), Refusal.NO_ROOM)
        assert pair.destination.idle()
        await mover.resume()

    async def test_reservation_is_accounted(self, pair: MovePair) -> None:
        _, mover, _ = await self.start(pair)
        await mover.begin()
        reserved = await mover.reserve()
        assert reserved.slots >= len(mover.begun.tokens if mover.begun else ())
        assert conserved(pair.destination)
        more = await mover.reserve(reserved.slots + 3 * pair.destination.info.page_size)
        assert more.slots >= reserved.slots + 3 * pair.destination.info.page_size
        assert conserved(pair.destination)
        await mover.resume()
        await pair.destination.eventually(pair.destination.idle, "the destination's memory")

    async def test_incompatible(self, pair: MovePair) -> None:
        undisturbed, mover, stream = await self.start(pair)
        begun = await mover.begin()
        engine, layout = movable(pair.destination), layout_of(pair.source)
        others = [replace(layout, weights="others"), replace(layout, head_dim=layout.head_dim + 1)]
        for other in others:
            call = engine.reserve(mover.key, other, begun.tokens, len(begun.tokens), pair.reservation_s)
            await refused(call, Refusal.INCOMPATIBLE)
        assert pair.destination.idle()
        await mover.resume()
        await pair.source.finished(stream)
        assert stream.tokens == undisturbed

    # ---- what isn't there, or not now

    async def test_who_is_not_there_does_not_move(self, pair: MovePair) -> None:
        source = pair.source
        request = source.request()
        await refused(Mover(pair, request).begin(), Refusal.UNKNOWN)
        stream = source.submit(request)
        await source.finished(stream)
        await refused(Mover(pair, request).begin(), Refusal.UNKNOWN)

    async def test_right_after_the_submission(self, pair: MovePair) -> None:
        source, request = pair.source, pair.source.request()
        stream, mover = source.submit(request), Mover(pair, request)
        try:
            await mover.begin()
        except MoveRefused as error:
            if error.refusal is not Refusal.BUSY:
                raise
        else:
            await mover.resume()
        await source.finished(stream)
        assert stream.tokens == await source.generate(source.request(request.prompt))

    async def test_it_moves_once_at_a_time(self, pair: MovePair) -> None:
        _, mover, _ = await self.start(pair)
        await mover.begin()
        await refused(Mover(pair, mover.request).begin(), Refusal.BUSY)
        await mover.resume()

    async def test_no_round_of_what_never_began(self, pair: MovePair) -> None:
        undisturbed, mover, stream = await self.start(pair)
        await mover.begin()
        reserved = await mover.reserve()
        await movable(pair.source).resume(mover.key, mover.key.attempt)
        await refused(movable(pair.source).send_delta(mover.key, 0, reserved), Refusal.UNKNOWN)
        await refused(movable(pair.source).freeze(mover.key, 0, reserved), Refusal.UNKNOWN)
        await movable(pair.destination).abort(mover.key)
        await pair.source.finished(stream)
        assert stream.tokens == undisturbed

    async def test_finished_while_moving(self, pair: MovePair) -> None:
        undisturbed, mover, stream = await self.start(pair)
        await drive_to(mover, "copy")
        await pair.source.finished(stream)
        await refused(mover.freeze(), Refusal.UNKNOWN)
        await refused(mover.copy(), Refusal.UNKNOWN)
        await movable(pair.destination).abort(mover.key)
        await movable(pair.source).resume(mover.key, 2)
        assert stream.tokens == undisturbed

    # ---- cancels

    @pytest.mark.parametrize("phase", PHASES)
    async def test_cancelled_while_moving(self, pair: MovePair, phase: str) -> None:
        _, mover, stream = await self.start(pair)
        await drive_to(mover, phase)
        pair.source.engine.cancel(mover.request.key)
        await pair.source.finished(stream)
        assert stream.finish is not None
        assert stream.finish.reason == FinishReason.CANCELLED
        await refused(movable(pair.source).freeze(mover.key, mover.next, mover.reserved), Refusal.UNKNOWN)
        await movable(pair.destination).abort(mover.key)
        await movable(pair.source).release(mover.key)

    @pytest.mark.parametrize("end", ["release", "resume"])
    async def test_cancelled_and_ended_at_once(self, pair: MovePair, end: str) -> None:
        _, mover, stream = await self.start(pair)
        await drive_to(mover, "freeze")
        pair.source.engine.cancel(mover.request.key)
        if end == "release":
            await movable(pair.source).release(mover.key)
        else:
            await movable(pair.source).resume(mover.key, 1)
        await movable(pair.destination).abort(mover.key)
        # The cancel came first.
        await pair.source.finished(stream)
        assert stream.finish is not None
        assert stream.finish.reason == FinishReason.CANCELLED

    # ---- state only

    async def test_recompute(self, pair: MovePair) -> None:
        undisturbed, mover, before = await self.start(pair)
        _, after = await mover.run_state_only()
        await pair.source.eventually(pair.source.idle, "the source's memory")
        await pair.destination.finished(after)
        assert before.tokens + after.tokens == undisturbed
        assert before.tokens
        assert after.tokens

    @pytest.mark.parametrize("phase", STATE_PHASES)
    async def test_give_up_a_recompute(self, pair: MovePair, phase: str) -> None:
        undisturbed, mover, stream = await self.start(pair)
        await drive_state_to(mover, phase)
        await mover.resume(attempt=3)
        await pair.source.finished(stream)
        assert stream.tokens == undisturbed

    @pytest.mark.parametrize("phase", STATE_PHASES)
    async def test_a_waiting_request_does_not_move_after_all(self, pair: MovePair, phase: str) -> None:
        undisturbed, mover, stream = await self.start_waiting(pair)
        await drive_state_to(mover, phase)
        request = await mover.resume(attempt=2)
        assert stream.tokens == []
        self.free(pair.source, stream)
        await pair.source.finished(stream)
        assert stream.tokens == undisturbed
        assert request.key.attempt == 2

    @pytest.mark.parametrize("phase", STATE_PHASES)
    async def test_a_waiting_request_is_cancelled(self, pair: MovePair, phase: str) -> None:
        _, mover, stream = await self.start_waiting(pair)
        await drive_state_to(mover, phase)
        pair.source.engine.cancel(mover.request.key)
        await pair.source.finished(stream)
        assert stream.finish is not None
        assert stream.finish.reason == FinishReason.CANCELLED
        await movable(pair.destination).abort(mover.key)
        await movable(pair.source).release(mover.key)

    async def test_preempted_while_moving(self, pair: MovePair) -> None:
        source = pair.source
        older = source.submit(self.filler(source, source.prompt_tokens))
        await source.produced(older, source.prompt_tokens)
        # The newer one gives way, and leaves room enough for the older one to go on for a while.
        prompt = source.prompt(8 * source.prompt_tokens)
        mover = Mover(pair, source.request(prompt, max_new_tokens=source.long_tokens))
        before = source.submit(mover.request)
        await source.produced(before, 1)
        await mover.begin()
        reserved = await mover.reserve()
        starving = await starve(source)
        await source.eventually(lambda: source.engine.load().waiting > 0, "a preemption")
        await refused(movable(source).send_delta(mover.key, mover.next, reserved), Refusal.PREEMPTED)
        await refused(movable(source).freeze(mover.key, mover.next, reserved), Refusal.PREEMPTED)
        # That move is over; as state only it may go, as the same hop.
        await movable(source).resume(mover.key, mover.key.attempt)
        begun = await mover.begin()
        assert begun.tokens == ()
        await mover.freeze(state_only=True)
        _, after = await mover.commit()
        await mover.release()
        await movable(source).abort(starving)
        await pair.destination.finished(after)
        await source.finished(older)
        assert before.tokens + after.tokens == await source.generate(
            source.request(mover.request.prompt, max_new_tokens=source.long_tokens)
        )
