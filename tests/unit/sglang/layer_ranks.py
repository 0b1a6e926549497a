"""Two ranks of a pipeline in one process: their part of moving layers is real, SGLang's scheduler and model are not.

Each keeps in every layer's slot a number that says which layer and slot it is, and checks at every step that it finds
what was written before: by itself, or by whoever had the layer then."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from meshift.backends.sglang import wire_layers as wire
from meshift.backends.sglang.plugin.data_plane import DataPlane
from meshift.backends.sglang.plugin.layers.pool import MovableLayers
from meshift.backends.sglang.plugin.layers.rank import RankLayers
from meshift.backends.sglang.plugin.layers.stack import LayerStack
from meshift.backends.sglang.plugin.layers.weights import Checkpoint, HostCopies, LayerWeights
from meshift.backends.sglang.wire_moves import Share, TargetAddress
from meshift.kv_memory.dirty_map import DirtyMap

LAYERS, SLOTS, HEADS, DIM, LOOP = 8, 400, 2, 4, 2
WIDTH = 16


class LayerInfo(msgspec.Struct, frozen=True):
    start_layer: int
    end_layer: int
    num_effective_layers: int


class Pool(MovableLayers):
    """With the attributes of SGLang's that are looked at."""

    size, page_size, head_num, head_dim = SLOTS, 1, HEADS, DIM
    store_dtype, device = torch.float32, "cpu"

    def __init__(self, start: int, end: int) -> None:
        self.start_layer, self.layer_num = start, end - start
        made = self._new_layers(range(start, end), [])
        self.k_buffer = [key for key, _ in made.values()]
        self.v_buffer = [value for _, value in made.values()]
        self.dirty = DirtyMap(SLOTS + 1)

    def _build_kv_buffer_descs(self) -> list[Any]:
        return []

    def _init_data_ptrs_and_strides(self) -> None:
        pass


class Model(torch.nn.Module):
    """Layers of one matrix each."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.model = inner

    def load_weights(self, weights: Any) -> None:
        mine = dict(self.named_parameters())
        for name, tensor in weights:
            mine[name].data.copy_(tensor)


class Inner(torch.nn.Module):
    def __init__(self, layers: torch.nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers
        self.start_layer = self.end_layer = 0


def save_checkpoint(folder: Path) -> None:
    """Layer i is full of i."""
    tensors = {f"model.layers.{i}.weight": torch.full((WIDTH, WIDTH), float(i)) for i in range(LAYERS)}
    save_file({name: one for name, one in tensors.items() if not name.endswith("7.weight")}, folder / "a.safetensors")
    save_file({"model.layers.7.weight": tensors["model.layers.7.weight"]}, folder / "b.safetensors")


def make_layer_weights(folder: Path, start: int, end: int, copies_bytes: int = 0) -> LayerWeights:
    """Of a rank that has loaded layers [start, end)."""
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    stack = LayerStack(layers, torch.nn.Identity)
    for index, layer in enumerate(layers):
        if start <= index < end:
            torch.nn.init.constant_(layer.weight, float(index))
        else:
            stack.release(index)
    weights = LayerWeights(Model(Inner(stack.listed(start, end))), stack, Checkpoint(folder), HostCopies(copies_bytes))
    weights.switch(start, end)
    return weights


class Agent:
    """What ranks say, by nonce."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.iteration = -1
        self.answers: dict[int, Any] = {}
        self.told: list[Any] = []
        self.moves_out = SimpleNamespace(break_off=lambda reason: None)

    def answer(self, kind: Callable[..., Any], nonce: int, **fields: Any) -> None:
        self.answers[nonce] = kind(rank=self.rank, nonce=nonce, iteration=self.iteration, **fields)

    def tell(self, report: Any) -> None:
        self.told.append(report)


class Rank:
    """One of the two."""

    def __init__(self, rank: int, span: tuple[int, int], weights: LayerWeights) -> None:
        self.pool = Pool(*span)
        self.agent = Agent(rank)
        self.data = DataPlane(rank, "127.0.0.1", lambda: SimpleNamespace(send=lambda report: None))  # type: ignore[arg-type,return-value]
        self.data.start()
        runner = SimpleNamespace(layer_info=LayerInfo(*span, span[1] - span[0]), attn_backend=None)
        self.capacity = SimpleNamespace(given_up=np.empty(0, np.int64), growth_obstacle="")
        self.scheduler = SimpleNamespace(
            pp_group=SimpleNamespace(rank_in_group=rank),
            pp_loop_size=LOOP,
            chunked_req=None,
            kv_capacity=self.capacity,
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: self.pool, get_all_free_pages=self._free),
            tp_worker=SimpleNamespace(model_runner=runner),
        )
        share = Share(layer_start=span[0], layer_end=span[1], head_start=0, head_end=HEADS, head_dim=DIM, dtype="f")
        self.kv: Any = SimpleNamespace(share=share)
        agent: Any = self.agent
        kv: Any = self.kv
        self.layers = RankLayers(self.scheduler, agent, kv, self.data)
        self.layers._weights = self.weights = weights
        self.handlers = self.layers.handlers()
        self.written: list[list[int]] = [[] for _ in range(LOOP)]
        """Slots of each micro-batch."""
        self.launched = 0
        self.held = 0

    @property
    def span(self) -> tuple[int, int]:
        return self.pool.start_layer, self.pool.start_layer + self.pool.layer_num

    def _free(self) -> torch.Tensor:
        used = {slot for slots in self.written for slot in slots}
        return torch.tensor([slot for slot in range(1, SLOTS + 1) if slot not in used])

    def iterate(self, commands: Sequence[Any]) -> None:
        """One iteration of the scheduler's loop."""
        self.agent.iteration += 1
        for command in commands:
            self.handlers[type(command)](command)
        if self.layers.holds_back(can_step=True):
            self.held += 1
            return
        batch = self.agent.iteration % LOOP
        self.layers.before_launch(SimpleNamespace(reqs=[SimpleNamespace(inflight_middle_chunks=0)]))
        self._step(self.written[batch])
        self.layers.after_launch(1)

    def _step(self, slots: list[int]) -> None:
        self.launched += 1
        slot = 1 + self.launched
        earlier = torch.tensor(slots, dtype=torch.int64)
        for layer, (key, value) in self.pool._held().items():
            for tensor, sign in ((key, 1.0), (value, -1.0)):
                wanted = sign * (1000.0 * (layer + 1) + earlier)
                assert torch.equal(tensor[earlier], wanted[:, None, None].expand(-1, HEADS, DIM)), (
                    f"rank {self.agent.rank} layer {layer} at iteration {self.agent.iteration}"
                )
                tensor[slot] = sign * (1000.0 * (layer + 1) + slot)
        slots.append(slot)
        self.pool.dirty.mark([slot])


class Pipeline:
    """Both ranks. The first is an iteration ahead, as a pipeline is that works."""

    def __init__(self, folder: Path, spans: Sequence[tuple[int, int]], *, ahead: int = 1) -> None:
        save_checkpoint(folder)
        self.ranks = [Rank(index, span, make_layer_weights(folder, *span)) for index, span in enumerate(spans)]
        self._queue: list[list[Any]] = []
        self._ahead = ahead
        self._nonce = 0

    def close(self) -> None:
        assert all(rank.data.close() for rank in self.ranks)

    def turn(self, *commands: Any) -> None:
        """An iteration of the first rank with these commands, and the one that is due of the second."""
        expired = self.ranks[0].layers.due_commands()
        self._queue.append([*commands, *expired])
        self.ranks[0].iterate(self._queue[-1])
        if len(self._queue) > self._ahead:
            self.ranks[1].iterate(self._queue.pop(0))

    def nonce(self) -> int:
        self._nonce += 1
        return self._nonce

    def ask(self, make: Callable[[int], Any], turns_max: int = 20_000) -> list[Any]:
        """Put a command in and turn until both have answered."""
        nonce = self.nonce()
        self.turn(make(nonce))
        return self.answers(nonce, turns_max)

    def answers(self, nonce: int, turns_max: int = 20_000) -> list[Any]:
        """Turn until both have answered."""
        for _ in range(turns_max):
            if all(nonce in rank.agent.answers for rank in self.ranks):
                return [rank.agent.answers[nonce] for rank in self.ranks]
            self.turn_idle()
        raise AssertionError(f"no answer within {turns_max} turns")

    def turn_idle(self) -> None:
        """Slots are few: step on only as far as they reach."""
        if self.ranks[0].launched < SLOTS - 4:
            self.turn()
        else:
            raise AssertionError("out of slots")

    def open(
        self, change_id: str, target: Sequence[tuple[int, int]], pairs: list[wire.LayerPair], **fields: Any
    ) -> Any:
        """BEGIN."""
        settings = {"deadline_s": 60.0, "verify": True, **fields}
        return self.ask(
            lambda nonce: wire.BeginLayers(
                nonce=nonce, change_id=change_id, target=list(target), pairs=pairs, **settings
            )
        )

    def copy(self, change_id: str, pairs: list[wire.LayerPair]) -> None:
        """Load, open and send."""
        self.ask(lambda nonce: wire.LoadLayers(nonce=nonce, change_id=change_id))
        opened = self.ask(lambda nonce: wire.OpenLayers(nonce=nonce, change_id=change_id))
        found: dict[int, TargetAddress] = dict(one for answer in opened for one in answer.addresses)
        addresses = [found[index] for index in range(len(pairs))]
        self.ask(lambda nonce: wire.SendLayers(nonce=nonce, change_id=change_id, addresses=addresses, bytes_per_s=None))
