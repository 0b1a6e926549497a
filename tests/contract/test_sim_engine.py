"""The simulated engine passes the engine suites: in virtual time, step by step and skipping; on a real clock; and with
real sockets."""

import random
from collections.abc import AsyncIterator

import pytest

from meshift.backends.sim import SimEngine, SimParameters
from meshift.backends.sim.work import Emit
from meshift.kv_memory.transport import Link, MemoryFabric, MemoryTransport, TcpTransport
from meshift.services.simulation.virtual_time import VirtualTimeLoop
from tests.contract.engine_kit import CollectingListener, MovePair, Rig, Stream
from tests.contract.engine_move_suite import EngineMoveSuite
from tests.contract.engine_resize_suite import EngineResizeSuite, resize
from tests.contract.engine_suite import EngineGenerationSuite, EngineStopSuite
from tests.support.socket_loop import SocketLoop

SEED = 7
MODES: list[tuple[bool, Emit]] = [(False, "step"), (True, "step"), (True, "edges")]
# Small enough that concurrent requests queue and preempt each other.
TIGHT = SimParameters(capacity=1_000)
REAL_SPEED = 100.0


class SimRig(Rig):
    """An engine that may take many steps at once has to be asked for what it has."""

    async def produced(self, stream: Stream, count: int) -> None:
        assert isinstance(self.engine, SimEngine)
        flush = self.engine.flush
        await self.eventually(
            lambda: flush() or len(stream.tokens) >= count or stream.finish is not None, f"{count} tokens"
        )


async def start_rig(engine: SimEngine, timeout_s: float = 600.0) -> Rig:
    """A started engine, in the suite's sizes."""
    listener = CollectingListener()
    info = await engine.start(listener)
    return SimRig(
        engine,
        info,
        listener,
        random.Random(SEED),
        (3, info.model.vocabulary_size),
        timeout_s,
        filler_prompts=(13_000,),
        waiter_tokens=1_000,
    )


@pytest.fixture(params=MODES, ids=lambda mode: f"{'skip' if mode[0] else 'single'}-{mode[1]}")
def mode(request: pytest.FixtureRequest) -> tuple[bool, Emit]:
    """How the engine steps and emits."""
    chosen: tuple[bool, Emit] = request.param
    return chosen


class TestGeneration(EngineGenerationSuite):
    loop_factory = VirtualTimeLoop

    @pytest.fixture
    async def rig(self, mode: tuple[bool, Emit]) -> AsyncIterator[Rig]:
        rig = await start_rig(SimEngine(TIGHT, skip_steps=mode[0], emit=mode[1]))
        yield rig
        await rig.settle()
        await rig.engine.stop(1.0)


class TestStop(EngineStopSuite):
    loop_factory = VirtualTimeLoop

    @pytest.fixture
    async def rig(self, mode: tuple[bool, Emit]) -> Rig:
        return await start_rig(SimEngine(TIGHT, skip_steps=mode[0], emit=mode[1]))


class TestResizes(EngineResizeSuite):
    loop_factory = VirtualTimeLoop

    @pytest.fixture
    async def rig(self, mode: tuple[bool, Emit]) -> AsyncIterator[Rig]:
        rig = await start_rig(SimEngine(TIGHT, skip_steps=mode[0], emit=mode[1]))
        yield rig
        assert (await resize(rig, rig.info.capacity)).capacity == rig.info.capacity
        await rig.settle()
        await rig.engine.stop(1.0)


class TestGenerationOnARealClock(EngineGenerationSuite):
    @pytest.fixture
    async def rig(self) -> AsyncIterator[Rig]:
        rig = await start_rig(SimEngine(TIGHT.faster(REAL_SPEED)), timeout_s=20.0)
        yield rig
        await rig.settle()
        await rig.engine.stop(1.0)


class TestMoves(EngineMoveSuite):
    loop_factory = VirtualTimeLoop

    @pytest.fixture(params=["instant", "slow"])
    def fabric(self, request: pytest.FixtureRequest) -> MemoryFabric:
        slow = Link(bandwidth_bytes_per_s=1e6, latency_s=1e-3)
        return MemoryFabric(link=slow if request.param == "slow" else Link())

    @pytest.fixture
    async def pair(self, mode: tuple[bool, Emit], fabric: MemoryFabric) -> AsyncIterator[MovePair]:
        source, destination = [
            await start_rig(
                SimEngine(
                    transport=MemoryTransport(fabric, location),
                    skip_steps=mode[0],
                    emit=mode[1],
                    verify_moves=mode[0],
                )
            )
            for location in ("source", "destination")
        ]
        pair = MovePair(source, destination, reservation_s=10.0, short_reservation_s=0.2)
        yield pair
        await pair.settle()
        await source.engine.stop(1.0)
        await destination.engine.stop(1.0)


class TestMovesOverTcp(EngineMoveSuite):
    loop_factory = SocketLoop

    @pytest.fixture
    async def pair(self) -> AsyncIterator[MovePair]:
        source, destination = [
            await start_rig(
                SimEngine(SimParameters().faster(REAL_SPEED), transport=TcpTransport(), verify_moves=True),
                timeout_s=20.0,
            )
            for _ in range(2)
        ]
        pair = MovePair(source, destination, reservation_s=10.0, short_reservation_s=0.2)
        yield pair
        await pair.settle()
        await source.engine.stop(1.0)
        await destination.engine.stop(1.0)
