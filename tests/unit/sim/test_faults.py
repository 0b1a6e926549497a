"""Starts, ends, crashes and hangs."""

import asyncio
from collections.abc import Sequence

import pytest

from meshift.backends.base import Capability, EngineStartError, MoveKey, MoveRefused, TokenEvent
from meshift.backends.sim import DEFAULT_MODEL, SimEngine, SimParameters
from meshift.backends.sim.work import Emit
from meshift.kv_memory.layout import KvLayout
from meshift.kv_memory.transport import MemoryFabric, MemoryTransport
from meshift.schemas.errors import ContextTooLong, InvalidRequest, Unavailable
from meshift.schemas.identity import RequestKey
from meshift.services.simulation import virtual_time
from tests.unit.sim.kit import MS, PLAIN, Duo, Recorder, make_request, started, until_idle

MODES: list[tuple[bool, Emit]] = [(False, "step"), (True, "step"), (True, "edges")]


@pytest.mark.parametrize("mode", MODES)
def test_a_crash_tells_the_tokens_before_it_and_nothing_after(mode: tuple[bool, Emit]) -> None:
    async def main() -> None:
        engine, seen = await started(skip_steps=mode[0], emit=mode[1])
        request, queued = make_request(10, 100), make_request(150, 5)
        engine.submit(request)
        engine.submit(queued)
        await asyncio.sleep(0.085)
        engine.crash("memory fault")
        engine.crash("again")
        assert seen.failures == []
        await asyncio.sleep(5.0)
        # Prefill to 30, steps to 40 ... 80.
        assert len(seen.tokens[request.key]) == 6
        assert queued.key not in seen.tokens
        assert [failure.reason for failure in seen.failures] == ["memory fault"]
        with pytest.raises(Unavailable, match="memory fault"):
            engine.submit(make_request(10, 1))
        engine.cancel(request.key)
        assert engine.load().step_count == 6
        await engine.check_integrity()
        await engine.stop(1.0)
        await asyncio.sleep(1.0)
        assert not seen.ends

    virtual_time.run(main())


def test_a_crash_from_inside_the_listener() -> None:
    async def main() -> None:
        engine = SimEngine(PLAIN)

        class Breaker(Recorder):
            def on_step(self, events: Sequence[TokenEvent]) -> None:
                super().on_step(events)
                engine.crash("seen enough")

        seen = Breaker()
        await engine.start(seen)
        engine.submit(make_request(10, 100))
        await asyncio.sleep(1.0)
        assert len(seen.failures) == 1
        assert sum(len(tokens) for tokens in seen.tokens.values()) == 1

    virtual_time.run(main())


@pytest.mark.parametrize("mode", MODES)
def test_a_hang_is_silent_and_steps_no_more(mode: tuple[bool, Emit]) -> None:
    async def main() -> None:
        engine, seen = await started(skip_steps=mode[0], emit=mode[1])
        request = make_request(10, 100)
        engine.submit(request)
        await asyncio.sleep(0.085)
        engine.hang()
        await asyncio.sleep(0.0)
        load, tokens = engine.load(), len(seen.tokens[request.key])
        engine.submit(make_request(5, 5))
        engine.cancel(request.key)
        await asyncio.sleep(100.0)
        later = engine.load()
        assert (later.step_count, later.running, later.used) == (load.step_count, 1, load.used)
        assert later.waiting == 1
        assert len(seen.tokens[request.key]) == tokens == 6
        assert not seen.ends
        assert not seen.failures
        engine.crash("killed by the watchdog")
        await asyncio.sleep(0.001)
        assert len(seen.failures) == 1

    virtual_time.run(main())


def test_a_start_that_is_broken_off() -> None:
    async def main() -> None:
        slow = PLAIN.model_copy(update={"cold_start_ns": 30_000 * MS})
        for break_off in ("crash", "stop"):
            engine = SimEngine(slow)
            start = asyncio.ensure_future(engine.start(Recorder()))
            await asyncio.sleep(1.0)
            with pytest.raises(Unavailable):
                engine.submit(make_request(1, 1))
            assert engine.load().free == engine.load().capacity == 160
            if break_off == "crash":
                engine.crash("no weights")
            else:
                await engine.stop(1.0)
            with pytest.raises(EngineStartError, match=r"no weights|stopped"):
                await start
            with pytest.raises(EngineStartError):
                await engine.start(Recorder())

    virtual_time.run(main())


def test_starting_twice_is_refused() -> None:
    async def main() -> None:
        engine, _ = await started()
        with pytest.raises(EngineStartError):
            await engine.start(Recorder())

    virtual_time.run(main())


def test_a_data_plane_that_does_not_start() -> None:
    async def main() -> None:
        fabric = MemoryFabric()
        await MemoryTransport(fabric, "here").start()
        engine = SimEngine(PLAIN, transport=MemoryTransport(fabric, "here"))
        with pytest.raises(EngineStartError, match="data plane"):
            await engine.start(Recorder())

    virtual_time.run(main())


def test_moving_needs_a_data_plane() -> None:
    async def main() -> None:
        engine = SimEngine(PLAIN)
        info = await engine.start(Recorder())
        assert Capability.MOVE_REQUESTS not in info.capabilities
        assert info.layout is None
        assert (info.name, info.capacity, info.page_size) == ("sim", 160, 16)
        key = MoveKey("r", 1, 1)
        with pytest.raises(MoveRefused):
            await engine.begin_move(key)
        with pytest.raises(MoveRefused):
            await engine.reserve(key, KvLayout(((0, 1),), ((0, 1),), 1, "uint32", ""), [1], 5, 1.0)
        await engine.release(key)
        await engine.resume(key, 2)
        await engine.abort(key)

    virtual_time.run(main())


def test_what_can_never_fit_is_refused() -> None:
    async def main() -> None:
        engine, _ = await started()
        # The last token's KV is never stored: 150 + 11 tokens need 160 slots.
        engine.submit(make_request(150, 11))
        with pytest.raises(ContextTooLong):
            engine.submit(make_request(150, 12))
        await until_idle(engine)
        narrow = SimEngine(SimParameters(), DEFAULT_MODEL.model_copy(update={"context_tokens_max": 50}))
        await narrow.start(Recorder())
        narrow.submit(make_request(40, 10))
        with pytest.raises(ContextTooLong):
            narrow.submit(make_request(40, 11))

    virtual_time.run(main())


def test_a_resume_that_has_all_its_tokens_is_refused() -> None:
    async def main() -> None:
        engine, _ = await started()
        request = make_request(10, 3)
        object.__setattr__(request, "output", (5, 6, 7))
        with pytest.raises(InvalidRequest):
            engine.submit(request)
        object.__setattr__(request, "output", (5, 32_000))
        with pytest.raises(InvalidRequest):
            engine.submit(request)

    virtual_time.run(main())


def test_a_vocabulary_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="token_low"):
        SimEngine(PLAIN.model_copy(update={"token_low": 32_000}))


def test_a_listener_that_raises_loses_its_own_delivery_only() -> None:
    errors: list[object] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context["exception"]))
        engine = SimEngine(PLAIN)

        class Clumsy(Recorder):
            def on_step(self, events: Sequence[TokenEvent]) -> None:
                super().on_step(events)
                raise ValueError("clumsy")

        seen = Clumsy()
        await engine.start(seen)
        request = make_request(10, 5)
        engine.submit(request)
        await until_idle(engine)
        assert len(seen.tokens[request.key]) == 5
        # Two deliveries of one instant.
        queued = [make_request(10, 5), make_request(10, 5)]
        for other in queued:
            engine.submit(other)
            engine.cancel(other.key)
        await until_idle(engine)
        assert all(other.key in seen.ends for other in queued)

    virtual_time.run(main())
    assert len(errors) == 7


def test_the_listener_is_never_called_inside_a_call() -> None:
    async def main() -> None:
        engine, seen = await started()
        request = make_request(10, 5)
        engine.submit(request)
        engine.cancel(request.key)
        engine.flush()
        engine.load()
        assert not seen.ends
        await asyncio.sleep(0.001)
        assert seen.ends[request.key].reason == "cancelled"

    virtual_time.run(main())


def test_flush_gives_what_exists() -> None:
    async def main() -> None:
        engine, seen = await started(skip_steps=True, emit="edges")
        request = make_request(10, 50)
        engine.submit(request)
        await asyncio.sleep(0.085)
        assert len(seen.tokens[request.key]) == 1
        engine.flush()
        await asyncio.sleep(0)
        assert len(seen.tokens[request.key]) == 6
        await until_idle(engine)
        assert len(seen.tokens[request.key]) == 50

    virtual_time.run(main())


@pytest.mark.parametrize("end", ["stop", "crash"])
def test_the_end_breaks_what_waits_for_it(end: str) -> None:
    async def main() -> None:
        duo = await Duo().start()
        key = await duo.running(make_request(60, 50))
        begun = await duo.source.begin_move(key)
        reserved = await duo.reserve(key, begun.tokens, 96, 10.0)
        waits = [
            asyncio.ensure_future(duo.source.send_delta(key, 0, reserved)),
            asyncio.ensure_future(duo.source.freeze(key, 0, reserved)),
        ]
        await asyncio.sleep(0.001)
        for engine in (duo.source, duo.destination):
            if end == "stop":
                await engine.stop(1.0)
            else:
                engine.crash("fire")
        for wait in waits:
            with pytest.raises(MoveRefused):
                await wait
        for call in (duo.source.freeze(key, 0, None), duo.reserve(key, [], 0)):
            with pytest.raises(MoveRefused):
                await call
        await duo.source.resume(key, 2)
        await duo.source.release(key)
        await duo.destination.abort(key)
        assert duo.destination.load().reserved == 0

    virtual_time.run(main())


def test_a_hung_engine_does_not_freeze_until_it_is_stopped() -> None:
    async def main() -> None:
        duo = await Duo().start()
        key = await duo.running(make_request(60, 50))
        await duo.source.begin_move(key)
        duo.source.hang()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(duo.source.freeze(key, 0, None), 60.0)
        freeze = asyncio.ensure_future(duo.source.begin_move(MoveKey("nobody", 1, 1)))
        with pytest.raises(MoveRefused):
            await freeze
        await duo.source.stop(1.0)

    virtual_time.run(main())


def test_an_unknown_key_is_no_trouble() -> None:
    async def main() -> None:
        engine = SimEngine(PLAIN)
        engine.cancel(RequestKey("nobody", 1, 0))
        await engine.check_integrity()
        await engine.stop(1.0)
        await engine.stop(1.0)

    virtual_time.run(main())
