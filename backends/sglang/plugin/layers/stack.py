"""All layers of a model on every rank: those of the rank with their weights, the others as shells without memory.

SGLang builds only a stage's own layers. Here a rank builds all of them as one stack, so that each is bound to its
neighbours as an inner one, and gives the memory of those that it doesn't own back at once: what that costs is one layer
at a time. A layer's parameters keep their identity while their memory comes and goes.

Host memory keeps its addresses and gives its pages back: a layer that is freed into the heap stays with the process
wherever something small has come to lie behind it, which in time is everywhere.
"""

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from meshift.backends.sglang.plugin.activate import MOVABLE_LAYERS_VARIABLE
from meshift.kv_memory.arena.cpu import give_back

Build = Callable[..., Any]
MODEL_PARTS = ("layers", "start_layer", "end_layer")


class LayerStack:
    """The decoder layers of this process's model."""

    def __init__(self, layers: Iterable[torch.nn.Module], missing: Callable[[], torch.nn.Module]) -> None:
        """`missing` makes what stands in a model's list in place of a layer that isn't here."""
        self.layers = list(layers)
        self._missing = missing
        self._released: set[int] = set()

    def __len__(self) -> int:
        return len(self.layers)

    def parameters(self, layer: int) -> dict[str, torch.nn.Parameter]:
        """Of one layer, by their names within it."""
        return dict(self.layers[layer].named_parameters())

    def byte_count(self, layer: int) -> int:
        """Of a layer's weights, with memory or without."""
        return sum(one.numel() * one.element_size() for one in self.parameters(layer).values())

    def resident_bytes(self) -> int:
        """Of all layers that have memory."""
        return sum(self.byte_count(layer) for layer in range(len(self)) if layer not in self._released)

    def release(self, layer: int) -> None:
        """Give the memory of a layer back. Nothing may compute with it any more. Idempotent."""
        self._released.add(layer)
        _free(self.layers[layer])

    def take_memory(self, layer: int) -> None:
        """Memory for a layer's weights, with whatever is in it. Idempotent."""
        self._released.discard(layer)
        for parameter in self.layers[layer].parameters():
            wanted = parameter.numel() * parameter.element_size()
            storage = parameter.data.untyped_storage()
            if storage.nbytes() < wanted:
                storage.resize_(wanted)

    def listed(self, start: int, end: int) -> torch.nn.ModuleList:
        """A model's list of layers when it computes [start, end)."""
        first = model_range(start, end, len(self))[0]
        return torch.nn.ModuleList(
            layer if start <= index < end or index == first else self._missing()
            for index, layer in enumerate(self.layers)
        )


def model_range(start: int, end: int, layers: int) -> tuple[int, int]:
    """Layers [start, end) as SGLang's models want them: the first one's boundary receives what the stage before has
    sent, also where the stage has no layers and computes none."""
    return (start, end) if start < end else (min(start, layers - 1),) * 2


def _free(layer: torch.nn.Module) -> None:
    for parameter in layer.parameters():
        storage = parameter.data.untyped_storage()
        if storage.device.type == "cpu":
            give_back(storage.data_ptr(), storage.nbytes())
        else:
            storage.resize_(0)


_built: LayerStack | None = None


def built() -> LayerStack | None:
    """The stack of this process, once its model is built; None if it isn't one of these."""
    return _built


def build_all(
    make: Build, num_hidden_layers: int, layer_fn: Build, pp_rank: Any = None, pp_size: Any = None, **rest: Any
) -> Any:
    """Around SGLang's `make_layers`."""
    global _built
    movable = os.environ.get(MOVABLE_LAYERS_VARIABLE) == "1"
    if not movable or pp_rank is None or pp_size is None or pp_size == 1:
        return make(num_hidden_layers, layer_fn, pp_rank=pp_rank, pp_size=pp_size, **rest)
    from sglang.srt.distributed import get_pp_indices
    from sglang.srt.layers.utils import PPMissingLayer

    start, end = get_pp_indices(num_hidden_layers, pp_rank, pp_size)

    def build(idx: int, prefix: str) -> torch.nn.Module:
        layer: torch.nn.Module = layer_fn(idx=idx, prefix=prefix)
        if not start <= idx < end:
            # At once: there may be no room for all.
            _free(layer)
        return layer

    layers = make(num_hidden_layers, build, pp_rank=None, pp_size=None, **rest)
    _built = LayerStack(layers, lambda: PPMissingLayer(return_tuple=rest.get("return_tuple", False)))
    for layer in (*range(start), *range(end, num_hidden_layers)):
        _built.release(layer)
    return _built.listed(start, end), *model_range(start, end, num_hidden_layers)


def receive_from_stage(receive: Build, boundary: Any, tensors: Any, forward_batch: Any, **settings: Any) -> Any:
    """Around SGLang's `StageBoundary.from_pp`: stages before that have no layers send no residual."""
    if "residual" not in tensors.tensors:
        settings["allow_missing_residual"] = True
    return receive(boundary, tensors, forward_batch, **settings)
