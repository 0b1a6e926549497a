"""Changes of layers in the worker, with ranks that answer by a script: order, refusals, and what is taken back."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshift.backends.layouts import Layout, LayoutChange, LayoutRefused
from meshift.backends.sglang import wire
from meshift.backends.sglang import wire_layers as layers
from meshift.backends.sglang.layer_plan import check_target, layer_pairs
from meshift.backends.sglang.layers import LayerChanges
from meshift.backends.sglang.plugin.layers import table
from meshift.backends.sglang.questions import RanksDiffer
from meshift.backends.sglang.settings import SglangSettings
from meshift.backends.sglang.wire_moves import Share, TargetAddress
from meshift.schemas.layouts import CommitMode, LayoutFlags, LayoutRefusal, split_of
from tests.unit.sglang.scripted_ranks import ScriptedRanks, common

ADDRESS = TargetAddress(scheme="tcp", location="127.0.0.1:1", rank=1, token="t")
CHANGE = LayoutChange("c1", 0, split_of((2, 6)))
TIMEOUT_S = 5.0


def usual(command: Any, rank: int) -> list[wire.Answer]:
    fields = common(rank, command.nonce)
    match command:
        case layers.OpenLayers():
            return [layers.LayersOpened(**fields, addresses=[(0, ADDRESS)] if rank == 1 else [])]
        case layers.AskLayers():
            gets = 2 if rank == 1 else 0
            return [at(rank, command.nonce, layers=gets, loaded=gets)]
        case layers.SwitchLayers(goes=True) | layers.CommitLayers():
            return [switched(rank, command), layers.LayersDone(**common(rank, command.settled_nonce))]
    return [layers.LayersDone(**fields)]


def at(rank: int, nonce: int, **changes: Any) -> layers.LayersAt:
    fields: dict[str, Any] = {"layers": 2, "loaded": 2, "applied": 90, "problem": ""} | changes
    return layers.LayersAt(
        **common(rank, nonce), scheduled_tokens=100, layers=fields["layers"], layers_loaded=fields["loaded"],
        applied_tokens=fields["applied"], byte_count=7, rounds=3, problem=fields["problem"],
    )  # fmt: skip


def switched(rank: int, command: Any, **changes: Any) -> layers.LayersSwitched:
    fields: dict[str, Any] = {"switched_at": 40, "stop_ns": 1000 + rank, "switch_ns": 5, "tokens": 3, "byte_count": 9}
    return layers.LayersSwitched(**common(rank, command.nonce), **fields | changes)


class Bench:
    """The changes of two stages of four layers each."""

    def __init__(self, tmp_path: Path, **settings: Any) -> None:
        self.ranks = ScriptedRanks()
        self.told: list[Layout] = []
        chosen = SglangSettings(model_path=tmp_path, model_name="m", log_dir=tmp_path, pipeline_stages=2, **settings)
        instance: Any = self.ranks
        self.changes = LayerChanges(instance, chosen, self.told.append)
        facts = layers.LayerFacts(layer_bytes=10, fixed_bytes=5, block_bytes=3, layers_per_group=2)
        self.changes.start([ready(rank, facts) for rank in range(2)])
        for kind in layers.LayerCommand.__args__:
            self.ranks.scripts[kind] = usual

    def script(self, kind: type, script: Callable[[Any, int], list[wire.Answer]]) -> None:
        self.ranks.scripts[kind] = script

    def kinds(self) -> list[str]:
        return [name.removesuffix("Layers") for name in self.ranks.kinds()]

    async def prepare(self, change: LayoutChange = CHANGE) -> None:
        await self.changes.begin(change)
        await self.changes.load(change.change_id)
        await self.changes.copy(change.change_id, None)


def ready(rank: int, facts: layers.LayerFacts) -> wire.RankReady:
    share = Share(layer_start=4 * rank, layer_end=4 + 4 * rank, head_start=0, head_end=1, head_dim=1, dtype="float32")
    return wire.RankReady(
        rank=rank, capacity=64, page_size=1, request_tokens_max=60, vocabulary_size=9, layers=8, obeys_schemas=False,
        share=share, movable=facts,
    )  # fmt: skip


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def refused(step: Any, refusal: LayoutRefusal) -> str:
    with pytest.raises(LayoutRefused) as caught:
        await step
    assert caught.value.refusal is refusal
    return str(caught.value)


async def test_a_change_drained(bench: Bench) -> None:
    await bench.prepare()
    progress = await bench.changes.progress("c1")
    assert [(stage.stage, stage.layers, stage.lag_tokens, stage.rounds) for stage in progress.stages] == [(1, 2, 10, 3)]
    done = await bench.changes.commit("c1", CommitMode.DRAIN, TIMEOUT_S)
    assert (done.commit, done.stop_ns, done.last_patch_tokens) == (CommitMode.DRAIN, (1000, 1001), 3)
    assert bench.kinds() == ["Begin", "Load", "Open", "Send", "Ask", "Ask", "Drain", "Switch"]
    assert bench.told == [Layout(((0, 2), (2, 8)), 1, 2)] == [bench.changes.layout]
    assert [(end.change_id, end.committed, end.epoch) for end in bench.changes.now(None, 1).ended] == [("c1", True, 1)]
    assert bench.changes.change_id is None


async def test_a_change_that_lags(bench: Bench) -> None:
    await bench.prepare()
    assert (await bench.changes.commit("c1", CommitMode.LAG, TIMEOUT_S)).commit is CommitMode.LAG
    assert bench.kinds()[-1] == "Commit"


async def test_all_within_the_commit(bench: Bench) -> None:
    change = LayoutChange("c1", 0, CHANGE.target, LayoutFlags(no_patch=True, no_async=True))
    await bench.changes.begin(change)
    done = await bench.changes.commit("c1", CommitMode.LAG, TIMEOUT_S)
    assert done.commit is CommitMode.DRAIN
    assert bench.kinds() == ["Begin", "Ask", "Drain", "Load", "Ask", "Open", "Send", "Flush", "Switch"]


async def test_the_next_change_waits_until_memory_is_free(bench: Bench) -> None:
    bench.script(layers.SwitchLayers, lambda command, rank: [switched(rank, command)])
    await bench.prepare()
    await bench.changes.commit("c1", CommitMode.DRAIN, TIMEOUT_S)
    nonce = bench.ranks.sent[-1].settled_nonce  # type: ignore[union-attr]
    again = asyncio.ensure_future(bench.changes.begin(LayoutChange("c2", 1, split_of((4, 4)))))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not again.done()
    assert bench.kinds()[-1] == "Switch"
    for rank in range(2):
        bench.ranks.questions.note(layers.LayersDone(**common(rank, nonce)))
    await again
    assert bench.kinds()[-1] == "Begin"


@pytest.mark.parametrize("broken", [layers.DrainLayers, layers.FlushLayers, layers.LoadLayers, layers.OpenLayers])
async def test_what_fails_before_the_switch_is_taken_back(bench: Bench, broken: type) -> None:
    change = LayoutChange("c1", 0, CHANGE.target, LayoutFlags(no_patch=True, no_async=True))
    await bench.changes.begin(change)

    def fail(command: Any, rank: int) -> list[wire.Answer]:
        if broken in (layers.LoadLayers, layers.OpenLayers):
            refusal = LayoutRefusal.NO_MEMORY.value
            return [layers.LayersRefused(**common(rank, command.nonce), refusal=refusal, message="scripted")]
        return [layers.LayersDone(**common(rank, command.nonce), problem="scripted")]

    bench.script(broken, fail)
    with pytest.raises(LayoutRefused, match="scripted"):
        await bench.changes.commit("c1", CommitMode.DRAIN, TIMEOUT_S)
    last = bench.ranks.sent[-1]
    assert isinstance(last, layers.SwitchLayers)
    assert not last.goes
    assert bench.changes.layout.epoch == 0
    await bench.changes.abort("c1")
    assert bench.kinds()[-1] == "Abort"
    assert [(end.committed, end.refusal) for end in bench.changes.now(None, 1).ended] == [
        (False, LayoutRefusal.CANCELLED)
    ]


async def test_a_drain_that_takes_too_long_is_taken_back(bench: Bench) -> None:
    await bench.prepare()
    bench.ranks.scripts[layers.DrainLayers] = None
    await refused(bench.changes.commit("c1", CommitMode.DRAIN, 0.01), LayoutRefusal.DEADLINE)
    assert bench.kinds()[-1] == "Switch"
    assert bench.changes.change_id == "c1"


async def test_an_abort_meets_a_drain(bench: Bench) -> None:
    await bench.prepare()
    bench.ranks.scripts[layers.DrainLayers] = None
    commit = asyncio.ensure_future(bench.changes.commit("c1", CommitMode.DRAIN, TIMEOUT_S))
    while bench.kinds()[-1] != "Drain":
        await asyncio.sleep(0)
    abort = asyncio.ensure_future(bench.changes.abort("c1"))
    await asyncio.sleep(0)
    for rank in range(2):
        bench.ranks.questions.note(layers.LayersDone(**common(rank, bench.ranks.sent[-1].nonce)))  # type: ignore[union-attr]
    await refused(commit, LayoutRefusal.CANCELLED)
    await abort
    assert bench.kinds()[-2:] == ["Switch", "Abort"]
    assert bench.changes.layout.epoch == 0


async def test_not_ready(bench: Bench) -> None:
    await bench.changes.begin(CHANGE)
    await bench.changes.load("c1")
    await refused(bench.changes.commit("c1", CommitMode.DRAIN, TIMEOUT_S), LayoutRefusal.NOT_READY)
    await bench.changes.copy("c1", None)
    bench.script(layers.AskLayers, lambda command, rank: [at(rank, command.nonce, loaded=1)])
    await refused(bench.changes.commit("c1", CommitMode.DRAIN, TIMEOUT_S), LayoutRefusal.NOT_READY)
    bench.script(layers.AskLayers, lambda command, rank: [at(rank, command.nonce, problem="torn")])
    await refused(bench.changes.commit("c1", CommitMode.DRAIN, TIMEOUT_S), LayoutRefusal.BROKEN)
    assert "Drain" not in bench.kinds()


async def test_before_the_first_round_everything_lags(bench: Bench) -> None:
    await bench.prepare()
    bench.script(layers.AskLayers, lambda command, rank: [at(rank, command.nonce, applied=-1)])
    assert (await bench.changes.progress("c1")).lag_tokens == 100


async def test_twice_is_once(bench: Bench) -> None:
    for _ in range(2):
        await bench.prepare()
    assert bench.kinds() == ["Begin", "Load", "Open", "Send"]
    await refused(bench.changes.begin(LayoutChange("c2", 0, CHANGE.target)), LayoutRefusal.BUSY)
    for _ in range(2):
        await bench.changes.abort("c1")
    assert bench.kinds()[-2:] == ["Send", "Abort"]
    for step in (bench.changes.begin(CHANGE), bench.changes.load("c1"), bench.changes.progress("c1")):
        await refused(step, LayoutRefusal.UNKNOWN)


async def test_what_never_began_is_aborted_for_ever(bench: Bench) -> None:
    await bench.changes.abort("c1")
    await refused(bench.changes.begin(CHANGE), LayoutRefusal.UNKNOWN)
    assert bench.kinds() == []


async def test_ranks_end_it_by_themselves(bench: Bench) -> None:
    await bench.prepare()
    for rank in range(2):
        assert bench.changes.change_id == "c1"
        bench.changes.note_expired(layers.LayersExpired(rank=rank, change_id="c1"))
    assert [(end.refusal, end.epoch) for end in bench.changes.now(None, 1).ended] == [(LayoutRefusal.DEADLINE, 0)]
    await refused(bench.changes.commit("c1", CommitMode.DRAIN, TIMEOUT_S), LayoutRefusal.UNKNOWN)


async def test_ranks_that_differ(bench: Bench) -> None:
    await bench.prepare()
    bench.script(
        layers.CommitLayers,
        lambda command, rank: [
            switched(rank, command, switched_at=rank), layers.LayersDone(**common(rank, command.settled_nonce))
        ],
    )  # fmt: skip
    with pytest.raises(RanksDiffer, match="switch"):
        await bench.changes.commit("c1", CommitMode.LAG, TIMEOUT_S)


@pytest.mark.parametrize(
    ("target", "epoch", "refusal"),
    [
        ((2, 6), 1, LayoutRefusal.STALE),
        ((2, 4), 0, LayoutRefusal.INVALID),
        ((8,), 0, LayoutRefusal.INVALID),
        ((3, 5), 0, LayoutRefusal.UNALIGNED),
        ((4, 4), 0, LayoutRefusal.UNCHANGED),
    ],
)
async def test_targets(bench: Bench, target: tuple[int, ...], epoch: int, refusal: LayoutRefusal) -> None:
    await refused(bench.changes.begin(LayoutChange("c1", epoch, split_of(target))), refusal)
    assert bench.kinds() == []


def test_a_target_with_a_gap() -> None:
    with pytest.raises(LayoutRefused) as caught:
        check_target(LayoutChange("c", 0, ((0, 2), (4, 8))), Layout(((0, 4), (4, 8)), 0, 2), 8)
    assert caught.value.refusal is LayoutRefusal.INVALID


async def test_restart_is_somebody_elses(bench: Bench) -> None:
    change = LayoutChange("c1", 0, CHANGE.target, LayoutFlags(restart=True))
    await refused(bench.changes.begin(change), LayoutRefusal.UNSUPPORTED)


def test_pairs_over_any_distance() -> None:
    pairs = layer_pairs("c", ((0, 4), (4, 8), (8, 8)), ((0, 0), (0, 2), (2, 8)), 2)
    ends = [(pair.source, pair.destination, pair.start, pair.end) for pair in pairs]
    assert ends == [(0, 2, 0, 2), (1, 3, 0, 2), (0, 4, 2, 4), (1, 5, 2, 4), (2, 4, 4, 8), (3, 5, 4, 8)]
    assert len({pair.transfer_id for pair in pairs}) == len(pairs)


@pytest.mark.parametrize("event", list(table.ChangeEvent))
@pytest.mark.parametrize("state", list(table.ChangeState))
def test_the_table_is_all_there_is(state: table.ChangeState, event: table.ChangeEvent) -> None:
    if (state, event) in table.TRANSITIONS:
        assert table.next_state(state, event) in table.ChangeState
    else:
        with pytest.raises(table.IllegalTransition):
            table.next_state(state, event)
