"""The engine's own failure paths, on fake rank processes: no SGLang, milliseconds instead of half a minute."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from meshift.backends.base import EngineFailure, EngineRequest, EngineStartError
from meshift.backends.sglang import engine as engine_module
from meshift.backends.sglang import processes
from meshift.backends.sglang.engine import SglangEngine
from meshift.backends.sglang.settings import SglangSettings
from meshift.schemas.errors import Unavailable
from meshift.schemas.identity import RequestKey
from meshift.schemas.requests import FinishReason, Sampling
from tests.contract.engine_kit import CollectingListener
from tests.support.processes import watched
from tests.unit.sglang import fake_rank

TIMEOUT_S = 20.0
ROOT = Path(__file__).parents[3]
Start = Callable[..., SglangEngine]


@pytest.fixture
async def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Makes engines on fake ranks; stops them afterwards."""
    made: list[SglangEngine] = []

    def build(behaviour: str = "", variables: dict[str, str] | None = None, **settings: Any) -> SglangEngine:
        for name, value in {"FAKE_RANK": behaviour, "PYTHONPATH": str(ROOT), **(variables or {})}.items():
            monkeypatch.setenv(name, value)
        chosen = SglangSettings(model_path=tmp_path, model_name="m", log_dir=tmp_path, device="cpu", **settings)
        engine = SglangEngine(chosen)
        engine._instance._module = fake_rank.__name__
        made.append(engine)
        return engine

    yield build
    for engine in made:
        await engine.stop(0.1)
        assert all(rank.exited.is_set() for rank in engine._instance._ranks)


def request(name: str = "r", **sampling: Any) -> EngineRequest:
    return EngineRequest(RequestKey(name, 1, 0), (1, 2), (), Sampling(**{"max_new_tokens": 5, **sampling}))


async def test_start_generate_stop(make: Start, tmp_path: Path) -> None:
    engine, listener = make(), CollectingListener()
    info = await engine.start(listener)
    assert (info.name, info.capacity, info.model.context_tokens_max, info.model.layers) == ("sglang", 64, 60, 2)
    assert len(info.rank_pids) == 1
    assert listener.calls == 0, "the warm-up is nobody's business"
    stream = listener.open(RequestKey("r", 1, 0), 0)
    engine.submit(request())
    await listener.until(lambda: stream.finish is not None, TIMEOUT_S, "a finish")
    assert stream.tokens == [1]
    assert stream.finish is not None
    assert stream.finish.reason is FinishReason.LENGTH
    await engine.check_integrity()
    folder = engine._instance._link.folder if engine._instance._link else Path()
    assert folder.exists()
    await engine.stop(TIMEOUT_S)
    assert not folder.exists()
    assert "last words of rank 0" in (tmp_path / "sglang-rank0.log").read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(info.rank_pids[0], 0)
    with pytest.raises(Unavailable):
        engine.submit(request("late"))


async def test_a_rank_that_dies_while_starting(make: Start) -> None:
    engine = make("dies", pipeline_stages=2)
    with pytest.raises(EngineStartError) as raised:
        await engine.start(CollectingListener())
    assert "rank 1" in str(raised.value)
    assert "exited (7)" in str(raised.value)
    assert "last words of rank 1" in str(raised.value)
    with pytest.raises(Unavailable):
        engine.submit(request())


async def test_ranks_that_never_get_ready(make: Start) -> None:
    engine = make("silent", start_timeout_s=0.5)
    with pytest.raises(EngineStartError, match=r"aren't ready after 0\.5 s"):
        await engine.start(CollectingListener())


async def test_stop_while_starting(make: Start) -> None:
    engine = make("silent")
    starting = asyncio.create_task(engine.start(CollectingListener()))
    while not engine._instance.pids:
        await asyncio.sleep(0.01)
    await engine.stop(TIMEOUT_S)
    with pytest.raises(EngineStartError, match="stopped"):
        await starting


async def test_a_start_that_is_cancelled_leaves_no_process(make: Start) -> None:
    engine = make("silent")
    starting = asyncio.create_task(engine.start(CollectingListener()))
    while not engine._instance.pids:
        await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert all(rank.exited.is_set() for rank in engine._instance._ranks)


async def test_a_stubborn_rank_is_killed_at_the_deadline(make: Start) -> None:
    engine = make("stubborn")
    await engine.start(CollectingListener())
    loop = asyncio.get_running_loop()
    begun = loop.time()
    await engine.stop(0.2)
    assert 0.2 <= loop.time() - begun < 2.0
    assert engine._instance._ranks[0].exit_code == -signal.SIGKILL


async def test_what_a_rank_leaves_behind_is_killed(
    make: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "CHILDREN_WAIT_S", 0.05)
    engine = make("leaves a child")
    await engine.start(CollectingListener())
    child = int((tmp_path / "sglang-rank0.log").read_text().rpartition("child ")[2])
    with watched(child) as gone:
        await engine.stop(TIMEOUT_S)
        await asyncio.wait_for(gone.wait(), TIMEOUT_S)


async def test_a_rank_s_quit_signal_doesn_t_end_others(make: Start) -> None:
    other = make()
    await other.start(CollectingListener())
    await make("quits", instance_name="quitter").start(CollectingListener())
    await other.check_integrity()


async def test_instances_share_what_was_imported(make: Start) -> None:
    engines = [make(instance_name=name, layer_partition=(partition,)) for name, partition in (("a", 2), ("b", 3))]
    for engine in engines:
        await engine.start(CollectingListener())
    one, other = (engine._instance._forks for engine in engines)
    assert one is not None
    assert other is not None
    assert one._server is other._server
    server = one._server._process.pid
    with watched(server) as gone:
        await engines[0].stop(TIMEOUT_S)
        await engines[1].check_integrity()
        await engines[1].stop(TIMEOUT_S)
        await asyncio.wait_for(gone.wait(), TIMEOUT_S)


async def test_other_imports_have_another_server(make: Start) -> None:
    engines = [make(instance_name=name, threads_per_rank=threads) for name, threads in (("a", 1), ("b", 2))]
    for engine in engines:
        await engine.start(CollectingListener())
    one, other = (engine._instance._forks for engine in engines)
    assert one is not None
    assert other is not None
    assert one._server is not other._server


async def test_when_the_server_dies_its_ranks_do(make: Start) -> None:
    engine, listener = make(), CollectingListener()
    info = await engine.start(listener)
    assert engine._instance._forks is not None
    with watched(info.rank_pids[0]) as gone:
        engine._instance._forks._server._process.kill()
        await listener.until(lambda: bool(listener.failures), TIMEOUT_S, "on_failure")
        assert "SIGKILL" in listener.failures[0].reason
        await asyncio.wait_for(gone.wait(), TIMEOUT_S)
    await make(instance_name="next").start(CollectingListener())


async def test_imports_that_fail(make: Start, tmp_path: Path) -> None:
    engine = make()
    engine._instance._module = "tests.unit.sglang.no_such_module"
    with pytest.raises(EngineStartError, match=r"No module named 'tests.unit.sglang.no_such_module'"):
        await engine.start(CollectingListener())


async def test_death_of_a_rank_is_told_once(make: Start) -> None:
    asked: list[Exception] = []

    class Asks(CollectingListener):
        """In the instant of the failure, before anything is cleared away."""

        def on_failure(self, failure: EngineFailure) -> None:
            try:
                engine.check_integrity().send(None)
            except Exception as error:
                asked.append(error)
            super().on_failure(failure)

    engine, listener = make("dies after a request"), Asks()
    await engine.start(listener)
    listener.open(RequestKey("r", 1, 0), 0)
    engine.submit(request())
    await listener.until(lambda: bool(listener.failures), TIMEOUT_S, "on_failure")
    assert "exited (9)" in listener.failures[0].reason
    assert [type(error) for error in asked] == [ConnectionError]
    calls = listener.calls
    with pytest.raises(Unavailable):
        engine.submit(request("late"))
    engine.cancel(RequestKey("r", 1, 0))
    with pytest.raises(ConnectionError):
        await engine.check_integrity()
    await engine.stop(TIMEOUT_S)
    with pytest.raises(ConnectionError):
        await engine.check_integrity()
    assert listener.calls == calls
    assert listener.problems == []


async def test_a_gap_in_a_stream_is_a_failure(make: Start) -> None:
    engine, listener = make(variables={"FAKE_GAP": "1"}), CollectingListener()
    await engine.start(listener)
    listener.open(RequestKey("r", 1, 0), 0)
    engine.submit(request())
    await listener.until(lambda: bool(listener.failures), TIMEOUT_S, "on_failure")
    assert "ProtocolViolation" in listener.failures[0].reason


async def test_a_listener_that_raises_is_not_swallowed(make: Start) -> None:
    engine, listener = make(), CollectingListener()

    def raise_error() -> None:
        raise RuntimeError("bug in the listener")

    await engine.start(listener)
    listener.open(RequestKey("r", 1, 0), 0)
    listener.hooks.append(raise_error)
    engine.submit(request())
    await listener.until(lambda: bool(listener.failures), TIMEOUT_S, "on_failure")
    assert "bug in the listener" in listener.failures[0].reason


async def test_integrity_problems(make: Start) -> None:
    with pytest.raises(AssertionError, match="rank 0: 3 pages are lost"):
        await make(variables={"FAKE_PROBLEM": "3 pages are lost"}).start(CollectingListener())


async def test_integrity_without_an_answer(make: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    await engine.start(CollectingListener())
    os.kill(engine._instance.pids[0], signal.SIGSTOP)
    monkeypatch.setattr(engine_module, "INTEGRITY_TIMEOUT_S", 0.05)
    with pytest.raises(TimeoutError):
        await engine.check_integrity()
    # A stopped process doesn't hear SIGTERM.
    await engine.stop(0.1)
    assert engine._instance._ranks[0].exit_code == -signal.SIGKILL


async def test_what_holds_kv_is_asked_of_the_ranks(make: Start) -> None:
    engine = make()
    with pytest.raises(Unavailable):
        await engine.kv_memory()
    await engine.start(CollectingListener())
    now = await engine.kv_memory()
    assert (now.resident_bytes, now.request_tokens_max) == (50, 60)
    assert now.units is not None
    assert (now.units.committed_bytes, now.units.waste_bytes) == (1700, 68)
