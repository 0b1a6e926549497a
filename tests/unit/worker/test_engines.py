"""From a worker's settings to its engine."""

from typing import Any

import pytest

from meshift.backends.base import Capability
from meshift.backends.sim.engine import SimEngine
from meshift.services.cli.settings import parse_settings
from meshift.services.worker.engines import EngineSettings, build_engine, sglang_settings
from meshift.services.worker.main import WorkerSettings
from tests.contract.engine_kit import CollectingListener

DATA: dict[str, Any] = {"data_host": "127.0.0.2", "data_transport": "nixl", "data_bytes_per_s": 5e6}


def test_the_data_plane_of_sglang_is_where_it_is_said() -> None:
    settings = sglang_settings(EngineSettings(**DATA))
    assert (settings.data_host, settings.data_transport, settings.data_bytes_per_s) == ("127.0.0.2", "nixl", 5e6)
    assert sglang_settings(EngineSettings()).data_host == "127.0.0.1"


def test_attention_and_stacking_of_sglang_are_those_that_were_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = sglang_settings(EngineSettings())
    assert (plain.attention_backend, plain.layers_per_group) == (None, None)
    chosen = sglang_settings(EngineSettings(attention_backend="torch_native", layers_per_group=2))
    assert (chosen.attention_backend, chosen.layers_per_group) == ("torch_native", 2)
    monkeypatch.setenv("MESHIFT_ATTENTION_BACKEND", "meshift_triton")
    monkeypatch.setenv("MESHIFT_LAYERS_PER_GROUP", "4")
    by_environment = parse_settings(WorkerSettings, "meshift worker", ["--layers-per-group", "8"])
    assert (by_environment.attention_backend, by_environment.layers_per_group) == ("meshift_triton", 8)


async def test_requests_of_simulated_engines_move_over_tcp() -> None:
    engine = build_engine("sim", EngineSettings(**DATA))
    assert isinstance(engine, SimEngine)
    info = await engine.start(CollectingListener())
    assert Capability.MOVE_REQUESTS in info.capabilities
    transport = engine._transport
    assert transport is not None
    assert transport.open_transfer("t", lambda _patch: None).location.startswith("127.0.0.2:")
    await engine.stop(1.0)


def test_an_engine_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="unknown engine 'x'"):
        build_engine("x", EngineSettings())
