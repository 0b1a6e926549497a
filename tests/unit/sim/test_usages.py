"""The running requests by execution priority."""

import asyncio
from dataclasses import replace

from meshift.backends.base import ClassUsage
from meshift.schemas.requests import Priority
from meshift.services.simulation import virtual_time
from tests.unit.sim.kit import WIDE, make_request, started


def test_running_requests_are_counted_by_execution_priority() -> None:
    async def main() -> None:
        engine, _ = await started(WIDE)
        assert engine.load().usages == ()
        for prompt in (16, 20):
            engine.submit(make_request(prompt, 100))
        await asyncio.sleep(0.5)
        load = engine.load()
        assert load.usages == (ClassUsage(0, 2, load.used),)
        engine.submit(replace(make_request(100, 100), priority=Priority(execution=2)))
        await asyncio.sleep(0.05)
        assert [(usage.execution, usage.running) for usage in engine.load().usages] == [(0, 2), (2, 1)], "in prefill"
        await asyncio.sleep(0.3)
        load = engine.load()
        assert [(usage.execution, usage.running) for usage in load.usages] == [(0, 2), (2, 1)]
        assert sum(usage.used for usage in load.usages) == load.used
        await engine.stop(1.0)

    virtual_time.run(main())


def test_one_that_only_waits_is_not_counted() -> None:
    async def main() -> None:
        engine, _ = await started()
        engine.submit(make_request(130, 20))
        engine.submit(replace(make_request(100, 20), priority=Priority(execution=1)))
        await asyncio.sleep(0.2)
        load = engine.load()
        assert (load.running, load.waiting) == (1, 1)
        assert [usage.execution for usage in load.usages] == [0]
        await engine.stop(1.0)

    virtual_time.run(main())


def test_the_present_size_of_each_request_also_amid_skipped_steps() -> None:
    async def main() -> None:
        engine, _ = await started(skip_steps=True, emit="edges")
        first, second = make_request(100, 40), make_request(100, 20)
        engine.submit(first)
        engine.submit(second)
        await asyncio.sleep(0.06)
        assert (engine.held_tokens(first.key), engine.held_tokens(second.key)) == (None, 0), "in prefill; waiting"
        await asyncio.sleep(0.06 + 0.1)
        assert (engine.held_tokens(first.key), engine.held_tokens(second.key)) == (110, 0)
        assert engine.held_tokens(first.key._replace(hop=1)) is None
        await engine.stop(1.0)

    virtual_time.run(main())
