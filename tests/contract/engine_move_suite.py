"""What every movable engine must do when a request moves: exact tokens, and memory back on every path."""

import asyncio

import pytest

from meshift.backends.base import (
    MoveRefused,
)
from meshift.schemas.requests import FinishReason
from tests.contract.engine_kit import POLL_S, MovePair, Mover, Stream, conserved, movable, watch_conservation

PHASES = ("begin", "reserve", "copy", "freeze", "last_copy")


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
    frozen = await mover.freeze()
    if phase == "freeze":
        return
    await mover.reserve(frozen.computed + 1)
    await mover.copy()


class EngineMoveSuite:
    """Needs the fixture `pair: MovePair`, which calls `MovePair.settle` afterwards."""

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

    async def test_two_moves_at_once(self, pair: MovePair) -> None:
        (whole, first, before), (other_whole, second, other_before) = await self.start_all(pair, pair)
        (_, after), (_, other_after) = await asyncio.gather(first.run(), second.run())
        await pair.destination.finished(after, other_after)
        assert before.tokens + after.tokens == whole
        assert other_before.tokens + other_after.tokens == other_whole

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

    async def test_a_given_up_move_can_be_tried_again(self, pair: MovePair) -> None:
        undisturbed, mover, before = await self.start(pair)
        await drive_to(mover, "last_copy")
        request = await mover.resume(attempt=2)
        await pair.source.produced(before, len(before.tokens) + 1)
        _, after = await Mover(pair, request).run()
        await pair.destination.finished(after)
        assert before.tokens + after.tokens == undisturbed

    async def test_commit_after_abort_is_refused(self, pair: MovePair) -> None:
        undisturbed, mover, stream = await self.start(pair)
        await drive_to(mover, "last_copy")
        await movable(pair.destination).abort(mover.key)
        await movable(pair.destination).abort(mover.key)
        with pytest.raises(MoveRefused):
            await mover.commit()
        await mover.resume()
        await pair.source.finished(stream)
        assert stream.tokens == undisturbed

    async def test_abort_before_reserve_refuses_both(self, pair: MovePair) -> None:
        _, mover, _ = await self.start(pair)
        await mover.begin()
        await movable(pair.destination).abort(mover.key)
        with pytest.raises(MoveRefused):
            await mover.reserve()
        await mover.resume()

    async def test_commit_without_reservation_is_refused(self, pair: MovePair) -> None:
        _, mover, _ = await self.start(pair)
        await mover.begin()
        await mover.freeze()
        with pytest.raises(MoveRefused):
            await mover.commit()
        await mover.resume()

    async def test_a_reservation_expires(self, pair: MovePair) -> None:
        undisturbed, mover, stream = await self.start(pair)
        await mover.begin()
        await mover.reserve(deadline_s=pair.short_reservation_s)
        assert pair.destination.engine.load().reserved > 0
        await pair.destination.eventually(pair.destination.idle, "the end of a reservation")
        with pytest.raises(MoveRefused):
            await mover.copy()
        await mover.resume()
        await pair.source.finished(stream)
        assert stream.tokens == undisturbed

    async def test_no_room(self, pair: MovePair) -> None:
        _, mover, _ = await self.start(pair)
        await mover.begin()
        with pytest.raises(MoveRefused):
            await mover.reserve(slots=pair.destination.info.capacity + 1)
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

    async def test_only_running_requests_move(self, pair: MovePair) -> None:
        source = pair.source
        request = source.request()
        with pytest.raises(MoveRefused):
            await Mover(pair, request).begin()
        stream = source.submit(request)
        with pytest.raises(MoveRefused):
            await Mover(pair, request).begin()
        await source.finished(stream)
        with pytest.raises(MoveRefused):
            await Mover(pair, request).begin()

    async def test_it_moves_once_at_a_time(self, pair: MovePair) -> None:
        _, mover, _ = await self.start(pair)
        await mover.begin()
        with pytest.raises(MoveRefused):
            await Mover(pair, mover.request).begin()
        await mover.resume()

    async def test_finished_while_moving(self, pair: MovePair) -> None:
        undisturbed, mover, stream = await self.start(pair)
        await drive_to(mover, "copy")
        await pair.source.finished(stream)
        with pytest.raises(MoveRefused):
            await mover.freeze()
        await movable(pair.destination).abort(mover.key)
        await movable(pair.source).resume(mover.key, 2)
        assert stream.tokens == undisturbed

    @pytest.mark.parametrize("phase", PHASES)
    async def test_cancelled_while_moving(self, pair: MovePair, phase: str) -> None:
        _, mover, stream = await self.start(pair)
        await drive_to(mover, phase)
        pair.source.engine.cancel(mover.request.key)
        await pair.source.finished(stream)
        assert stream.finish is not None
        assert stream.finish.reason == FinishReason.CANCELLED
        with pytest.raises(MoveRefused):
            await movable(pair.source).freeze(mover.key)
        await movable(pair.destination).abort(mover.key)
        await movable(pair.source).release(mover.key)

    async def test_cancelled_right_after_the_commit(self, pair: MovePair) -> None:
        _, mover, _ = await self.start(pair)
        await drive_to(mover, "last_copy")
        request, after = await mover.commit()
        pair.destination.engine.cancel(request.key)
        await mover.release()
        await pair.destination.finished(after)
        assert after.finish is not None
        assert after.finish.reason == FinishReason.CANCELLED

    async def test_release_and_resume_are_idempotent(self, pair: MovePair) -> None:
        undisturbed, mover, before = await self.start(pair)
        request, after = await mover.run()
        await movable(pair.source).release(mover.key)
        await movable(pair.source).resume(mover.key, 2)
        await movable(pair.destination).abort(mover.key)
        await pair.destination.finished(after)
        assert request.key == mover.key.destination
        assert before.tokens + after.tokens == undisturbed

    async def test_commit_happens_once(self, pair: MovePair) -> None:
        undisturbed, mover, before = await self.start(pair)
        _, after = await mover.run()
        assert mover.frozen is not None
        with pytest.raises(MoveRefused):
            await movable(pair.destination).commit(mover.key, mover.frozen, mover.arrival())
        await pair.destination.finished(after)
        assert before.tokens + after.tokens == undisturbed

    async def test_applied_waits_no_longer_than_told(self, pair: MovePair) -> None:
        _, mover, _ = await self.start(pair)
        await mover.begin()
        await mover.reserve()
        with pytest.raises(MoveRefused):
            await movable(pair.destination).applied(mover.key, 1, 5 * POLL_S)
        await mover.resume()
