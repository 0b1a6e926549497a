"""What every engine whose KV memory changes while it serves has to do. Subclasses provide the fixture `rig`: capacity
enough for `rig.concurrency` requests, and at its start again after each test."""

import asyncio
from collections.abc import Sequence

import pytest

from meshift.backends.base import KvResized, ResizableEngine
from meshift.schemas.errors import ContextTooLong
from tests.contract.engine_kit import Rig, Stream


async def resize(rig: Rig, capacity: int, *, preempt: bool = False) -> KvResized:
    """Resize, and see that the books agree at once."""
    assert isinstance(rig.engine, ResizableEngine)
    answer = await rig.engine.resize_kv(capacity, preempt=preempt)
    print(answer)
    await rig.engine.check_integrity()
    load = rig.engine.load()
    assert load.used + load.cached + load.free + load.reserved == load.capacity == answer.capacity
    return answer


class EngineResizeSuite:
    """Sizes follow from the engine's page and capacity."""

    async def undisturbed(self, rig: Rig, sizes: Sequence[tuple[list[int], int]]) -> list[list[int]]:
        """What requests of these prompts and numbers of new tokens give: all at once, which gives the same as one by
        one (see the suite of generation) in less time."""
        streams = [rig.submit(rig.request(prompt, max_new_tokens=count)) for prompt, count in sizes]
        await rig.finished(*streams)
        return [stream.tokens for stream in streams]

    async def running(self, rig: Rig, count: int, prompt: int, output: int) -> tuple[list[list[int]], list[Stream]]:
        """So many requests that hold memory, of prompts and outputs so long; and what they give undisturbed."""
        sizes = [(rig.prompt(prompt), output) for _ in range(count)]
        alone = await self.undisturbed(rig, sizes)
        streams = [rig.submit(rig.request(tokens, max_new_tokens=output)) for tokens, _ in sizes]
        for stream in streams:
            await rig.produced(stream, 1)
        return alone, streams

    async def end_alike(self, rig: Rig, alone: list[list[int]], streams: list[Stream]) -> int:
        """All give what they give when they are alone; how often they were preempted."""
        await rig.finished(*streams)
        assert [stream.tokens for stream in streams] == alone
        return sum(stream.finish.preemptions for stream in streams if stream.finish is not None)

    async def test_down_and_up_while_it_serves(self, rig: Rig) -> None:
        capacity, page = rig.info.capacity, rig.info.page_size
        alone, streams = await self.running(rig, 2, capacity // 12, capacity // 20)
        for wanted in (capacity * 2 // 3, capacity // 2, capacity * 3 // 4):
            answer = await resize(rig, wanted)
            assert (answer.capacity, answer.preempted, answer.reason) == (wanted // page * page, 0, "")
        assert await self.end_alike(rig, alone, streams) == 0

    async def test_requests_go_only_when_told(self, rig: Rig) -> None:
        capacity = rig.info.capacity
        alone, streams = await self.running(rig, 5, capacity // 8, capacity // 20)
        held = await resize(rig, capacity // 3)
        assert (held.preempted, held.reason) == (0, "requests hold the rest")
        small = await resize(rig, capacity // 3, preempt=True)
        assert small.capacity == capacity // 3 // rig.info.page_size * rig.info.page_size
        assert (small.preempted > 0, small.reason) == (True, "")
        assert await self.end_alike(rig, alone, streams) >= small.preempted

    async def test_never_below_what_a_request_may_need(self, rig: Rig) -> None:
        capacity = rig.info.capacity
        alone, streams = await self.running(rig, 1, capacity // 4, capacity // 20)
        answer = await resize(rig, rig.info.page_size, preempt=True)
        assert capacity // 4 <= answer.capacity < capacity // 2
        assert "may need" in answer.reason
        await self.end_alike(rig, alone, streams)
        small = await resize(rig, capacity // 4)
        assert small.reason == ""
        with pytest.raises(ContextTooLong):
            rig.submit(rig.request(rig.prompt(capacity // 4), max_new_tokens=rig.info.page_size))
        beyond = await resize(rig, 100 * capacity)
        assert beyond.capacity >= capacity
        assert "no more room" in beyond.reason

    async def test_several_at_once(self, rig: Rig) -> None:
        """Each is answered; what holds in the end is the last one's."""
        assert isinstance(rig.engine, ResizableEngine)
        capacity = rig.info.capacity
        alone, streams = await self.running(rig, 5, capacity // 8, capacity // 20)
        wanted = (capacity // 3, capacity, capacity // 2)
        answers = await asyncio.gather(*(rig.engine.resize_kv(one, preempt=True) for one in wanted))
        assert len(answers) == 3
        assert rig.engine.load().capacity == answers[-1].capacity
        await rig.engine.check_integrity()
        await self.end_alike(rig, alone, streams)

    async def test_at_random(self, rig: Rig) -> None:
        dice, capacity = rig.random, rig.info.capacity
        prompts = [rig.prompt(dice.randint(5, capacity // 10)) for _ in range(rig.concurrency)]
        lengths = [dice.randint(5, capacity // 20) for _ in prompts]
        sizes = list(zip(prompts, lengths, strict=True))
        alone = await self.undisturbed(rig, sizes)
        streams = []
        for prompt, count in sizes:
            streams.append(rig.submit(rig.request(prompt, max_new_tokens=count)))
            await resize(rig, dice.randint(capacity // 4, capacity), preempt=dice.random() < 0.5)
        await self.end_alike(rig, alone, streams)
