"""A rank's part of moving layers, with two ranks in one process that check every step's KV."""

import mmap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshift.backends.sglang import wire_layers as wire
from meshift.backends.sglang.layer_plan import layer_pairs
from meshift.backends.sglang.plugin.layers import facts, rank
from meshift.backends.sglang.plugin.layers.loading import Loading
from meshift.backends.sglang.plugin.layers.scheduled import Scheduled
from meshift.backends.sglang.plugin.layers.stack import LayerStack
from meshift.backends.sglang.plugin.layers.weights import LoadStopped
from meshift.kv_memory.arena.cpu import resident_bytes
from tests.unit.sglang.layer_ranks import LAYERS, LOOP, WIDTH, Pipeline, make_layer_weights, save_checkpoint

EVEN = ((0, 4), (4, 8))
DEADLINE_S = 20.0
TARGETS = [((0, 2), (2, 8)), ((0, 7), (7, 8)), ((0, 8), (8, 8)), ((0, 0), (0, 8))]


@pytest.fixture
def pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipeline]:
    monkeypatch.setattr(rank, "make_weights", lambda scheduler: None)
    made = Pipeline(tmp_path, EVEN)
    for _ in range(6):
        made.turn()
    yield made
    made.close()


def eventually(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def change_of(pipeline: Pipeline, index: int) -> Any:
    return pipeline.ranks[index].layers._change


def loaded(pipeline: Pipeline) -> None:
    for index in range(2):
        eventually(lambda index=index: change_of(pipeline, index).loading.is_complete)  # type: ignore[misc]


def begin(pipeline: Pipeline, target: Any, name: str = "c1", **fields: Any) -> list[wire.LayerPair]:
    pairs = layer_pairs(name, [one.span for one in pipeline.ranks], target, 1)
    answers = pipeline.open(name, target, pairs, **fields)
    assert all(isinstance(answer, wire.LayersDone) for answer in answers)
    return pairs


def drain(pipeline: Pipeline, name: str = "c1") -> list[Any]:
    """Wait for the copy outside of the iterations: those are quick, and slots few."""
    nonce = pipeline.nonce()
    pipeline.turn(wire.DrainLayers(nonce=nonce, change_id=name))
    held = pipeline.ranks[1]
    deadline_s = time.monotonic() + DEADLINE_S
    while not all(nonce in one.agent.answers for one in pipeline.ranks):
        assert time.monotonic() < deadline_s
        pipeline.turn()
    assert held.held >= LOOP
    return [one.agent.answers[nonce] for one in pipeline.ranks]


def switch(pipeline: Pipeline, name: str = "c1", goes: bool = True) -> list[Any]:
    nonce, settled = pipeline.nonce(), pipeline.nonce()
    pipeline.turn(wire.SwitchLayers(nonce=nonce, settled_nonce=settled, change_id=name, goes=goes))
    answers = pipeline.answers(nonce)
    if goes:
        settle(pipeline, settled)
    return answers


def settle(pipeline: Pipeline, nonce: int) -> None:
    for one in pipeline.ranks:
        eventually(lambda one=one: one.layers._change is None or not _cleans(one))  # type: ignore[misc]
    assert all(isinstance(answer, wire.LayersDone) for answer in pipeline.answers(nonce, 4))
    assert all(one.layers._change is None and one.layers.is_idle for one in pipeline.ranks)


def _cleans(one: Any) -> bool:
    cleaner = one.layers._change.cleaner
    return cleaner is None or cleaner.is_alive()


def _is_freeing(one: Any) -> bool:
    cleaner = one.layers._change.cleaner
    return cleaner is not None and cleaner.is_alive()


def check(pipeline: Pipeline, spans: Any) -> None:
    """Everything is where it belongs, and only there."""
    for one, span in zip(pipeline.ranks, spans, strict=True):
        assert one.span == span
        assert (one.kv.share.layer_start, one.kv.share.layer_end) == span
        stack = one.weights.stack
        assert stack.resident_bytes() == (span[1] - span[0]) * WIDTH * WIDTH * 4
        for layer in range(*span):
            assert float(stack.parameters(layer)["weight"].data.mean()) == layer
        inner = one.weights._model.model
        assert [index for index, layer in enumerate(inner.layers) if isinstance(layer, torch.nn.Linear)] == (
            list(range(*span)) or [min(span[0], LAYERS - 1)]
        )
        assert one.pool.staged == {}
        assert one.pool.dirty.readers == ()
        assert one.capacity.growth_obstacle == ""
    launched = [one.launched for one in pipeline.ranks]
    for _ in range(6):
        pipeline.turn()
    assert [one.launched for one in pipeline.ranks] == [count + 6 for count in launched]
    assert abs(launched[0] - launched[1]) <= 1


@pytest.mark.parametrize("target", TARGETS)
def test_drained_there_and_back(pipeline: Pipeline, target: Any) -> None:
    for name, spans in (("c1", target), ("c2", EVEN)):
        pairs = begin(pipeline, spans, name)
        pipeline.copy(name, pairs)
        loaded(pipeline)
        assert [answer.problem for answer in drain(pipeline, name)] == ["", ""]
        first, second = switch(pipeline, name)
        assert first.switched_at == second.switched_at
        assert dict(first.hashes) == dict(second.hashes)
        assert len(first.hashes) == len(pairs)
        assert first.stop_ns >= first.switch_ns > 0
        check(pipeline, spans)


@pytest.mark.parametrize("target", TARGETS)
def test_lagging_there_and_back(pipeline: Pipeline, target: Any) -> None:
    for name, spans in (("c1", target), ("c2", EVEN)):
        pairs = begin(pipeline, spans, name)
        pipeline.copy(name, pairs)
        loaded(pipeline)
        launched = pipeline.ranks[0].launched
        nonce, settled = pipeline.nonce(), pipeline.nonce()
        pipeline.turn(wire.CommitLayers(nonce=nonce, settled_nonce=settled, change_id=name))
        first, second = pipeline.answers(nonce)
        assert first.switched_at == second.switched_at
        assert pipeline.ranks[0].launched > launched, "it was held up"
        assert all(one.held == 0 for one in pipeline.ranks)
        settle(pipeline, settled)
        check(pipeline, spans)


def test_lagging_waits_for_a_prompt_in_chunks(pipeline: Pipeline) -> None:
    pairs = begin(pipeline, TARGETS[0])
    pipeline.copy("c1", pairs)
    loaded(pipeline)
    for one in pipeline.ranks:
        one.scheduler.chunked_req = object()
    nonce, settled = pipeline.nonce(), pipeline.nonce()
    pipeline.turn(wire.CommitLayers(nonce=nonce, settled_nonce=settled, change_id="c1"))
    for _ in range(10):
        pipeline.turn()
    assert [one.span for one in pipeline.ranks] == list(EVEN)
    pipeline.ranks[0].scheduler.chunked_req = None
    pipeline.turn()
    # The second rank is an iteration behind.
    pipeline.ranks[1].scheduler.chunked_req = None
    assert len({answer.switched_at for answer in pipeline.answers(nonce)}) == 1
    settle(pipeline, settled)
    check(pipeline, TARGETS[0])


def test_kv_that_never_comes_ends_the_rank(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "LAST_PATCH_TIMEOUT_S", 0.05)
    pairs = begin(pipeline, TARGETS[1])
    pipeline.copy("c1", pairs)
    loaded(pipeline)
    for receiver in change_of(pipeline, 0).receivers:
        pipeline.ranks[0].data.close_transfer(receiver.pair.transfer_id)

    def go_on() -> None:
        pipeline.turn(wire.CommitLayers(nonce=98, settled_nonce=99, change_id="c1"))
        for _ in range(4):
            pipeline.turn()

    with pytest.raises(RuntimeError, match="KV"):
        go_on()


@pytest.mark.parametrize("phase", ["begun", "loading", "opened", "copying", "taken back"])
def test_an_abort_in_every_phase(pipeline: Pipeline, phase: str) -> None:
    pairs = begin(pipeline, TARGETS[3])
    if phase == "loading":
        pipeline.ask(lambda nonce: wire.LoadLayers(nonce=nonce, change_id="c1"))
    elif phase == "opened":
        pipeline.ask(lambda nonce: wire.OpenLayers(nonce=nonce, change_id="c1"))
    elif phase in ("copying", "taken back"):
        pipeline.copy("c1", pairs)
    if phase == "taken back":
        loaded(pipeline)
        drain(pipeline)
        assert all(isinstance(answer, wire.LayersDone) for answer in switch(pipeline, goes=False))
        told = pipeline.ask(lambda nonce: wire.AskLayers(nonce=nonce, change_id="c1"))
        assert "taken back" in told[0].problem
    nonce = pipeline.nonce()
    pipeline.turn(wire.AbortLayers(nonce=nonce, change_id="c1"))
    pipeline.turn()
    settle(pipeline, nonce)
    check(pipeline, EVEN)
    answers = pipeline.ask(lambda nonce: wire.AskLayers(nonce=nonce, change_id="c1"))
    assert all(isinstance(answer, wire.LayersRefused) for answer in answers)
    again = begin(pipeline, TARGETS[0], "c2")
    pipeline.copy("c2", again)
    loaded(pipeline)
    drain(pipeline, "c2")
    switch(pipeline, "c2")
    check(pipeline, TARGETS[0])


def test_the_ranks_keep_the_deadline(pipeline: Pipeline) -> None:
    begin(pipeline, TARGETS[2], deadline_s=0.0)
    deadline_s = time.monotonic() + DEADLINE_S
    while not all(one.agent.told for one in pipeline.ranks):
        assert time.monotonic() < deadline_s
        if not any(one.layers._change and _is_freeing(one) for one in pipeline.ranks):
            pipeline.turn()
    assert [one.agent.told for one in pipeline.ranks] == [
        [wire.LayersExpired(rank=index, change_id="c1")] for index in range(2)
    ]
    check(pipeline, EVEN)


def test_a_commit_in_the_stream_beats_the_deadline(pipeline: Pipeline) -> None:
    pairs = begin(pipeline, TARGETS[2])
    pipeline.copy("c1", pairs)
    loaded(pipeline)
    for index in range(2):
        change_of(pipeline, index).deadline_s = 0.0
    nonce, settled = pipeline.nonce(), pipeline.nonce()
    # The leading rank's own command comes behind what the worker sent.
    pipeline.turn(wire.CommitLayers(nonce=nonce, settled_nonce=settled, change_id="c1"))
    assert len({answer.switched_at for answer in pipeline.answers(nonce)}) == 1
    settle(pipeline, settled)
    check(pipeline, TARGETS[2])


def test_an_abort_comes_too_late(pipeline: Pipeline) -> None:
    pairs = begin(pipeline, TARGETS[0])
    pipeline.copy("c1", pairs)
    loaded(pipeline)
    drain(pipeline)
    answers = pipeline.ask(lambda nonce: wire.AbortLayers(nonce=nonce, change_id="c1"))
    assert all(isinstance(answer, wire.LayersRefused) for answer in answers)
    switch(pipeline)
    check(pipeline, TARGETS[0])


def test_one_at_a_time(pipeline: Pipeline) -> None:
    begin(pipeline, TARGETS[0])
    answers = pipeline.open("c2", TARGETS[1], [])
    assert [answer.refusal for answer in answers] == ["busy", "busy"]
    assert all(one.capacity.growth_obstacle for one in pipeline.ranks)


def test_weights_from_the_checkpoint_and_from_host_memory(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    one = WIDTH * WIDTH * 4
    weights = make_layer_weights(tmp_path, 0, 4, copies_bytes=2 * one)
    parameter = weights.stack.parameters(7)["weight"]
    assert weights.load(7, lambda: False) == "disk"
    assert float(parameter.data.mean()) == 7.0
    for layer in (7, 1, 2):
        weights.drop(layer)
    assert weights.copies.byte_count == 2 * one
    assert [weights.load(layer, lambda: False) for layer in (7, 1, 2)] == ["disk", "host", "host"]
    assert parameter is weights.stack.parameters(7)["weight"]
    assert [float(weights.stack.parameters(layer)["weight"].data.mean()) for layer in (7, 1, 2)] == [7.0, 1.0, 2.0]


def test_memory_of_a_layer_really_goes() -> None:
    layers = [torch.nn.Linear(512, 512) for _ in range(3)]
    stack, weight = LayerStack(layers, torch.nn.Identity), layers[1].weight
    address, size = weight.data_ptr(), 512 * 512 * 4
    assert resident_bytes(address, size) == size
    stack.release(1)
    assert resident_bytes(address, size) <= 2 * mmap.PAGESIZE, "but for the ends, which share pages with others"
    stack.take_memory(1)
    weight.data.fill_(1.0)
    assert (weight.data_ptr(), resident_bytes(address, size)) == (address, size)
    assert stack.resident_bytes() == 3 * (size + 512 * 4)


def test_weights_that_cant_be_loaded_leave_nothing(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    weights = make_layer_weights(tmp_path, 0, 4)
    before = weights.stack.resident_bytes()
    loading = Loading(weights, [5, 7], (0, 8))
    loading.start()
    eventually(lambda: loading.problem != "")
    assert "layer 7" in loading.problem
    assert (loading.loaded, loading.is_complete) == (1, False)
    loading.undo()
    assert weights.stack.resident_bytes() == before
    with pytest.raises(LoadStopped):
        weights.load(6, lambda: True)
    assert weights.stack.resident_bytes() == before


def test_ranks_that_werent_started_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "built", lambda: None)
    pool = SimpleNamespace(stacking=SimpleNamespace(layers_per_group=4))
    scheduler = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool))
    told = facts.describe_layers(scheduler, None)
    assert (told.layers_per_group, told.obstacle != "") == (4, True)


def test_what_a_step_reads() -> None:
    scheduled = Scheduled()
    for iteration in range(6):
        scheduled.note_boundary(3)
        scheduled.add(10 * iteration)
    # Boundaries 3, 4 and 5 had 31, 61 and 101.
    plain, chunk = (SimpleNamespace(reqs=[SimpleNamespace(inflight_middle_chunks=count)]) for count in (0, 1))
    assert (scheduled.read_by(plain), scheduled.read_by(chunk), scheduled.tokens) == (31, 101, 151)
