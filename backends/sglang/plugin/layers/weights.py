"""Weights of single layers: out of host memory, or the checkpoint, into a model that computes with others."""

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from meshift.backends.sglang.plugin.layers.stack import LayerStack

_LAYER_NAME = re.compile(r"\.layers\.(\d+)\.")


class LoadStopped(Exception):
    """Nobody wants the layer any more."""


class HostCopies:
    """Weights of layers that this rank has had, in host memory, the least recently used going first."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._copies: OrderedDict[int, dict[str, torch.Tensor]] = OrderedDict()

    @property
    def byte_count(self) -> int:
        """Held now."""
        return sum(tensor.nbytes for copy in self._copies.values() for tensor in copy.values())

    def keep(self, layer: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy a layer's weights, if there is room for them."""
        size = sum(tensor.nbytes for tensor in weights.values())
        if size > self._bytes_max:
            return
        self._copies.pop(layer, None)
        while self.byte_count + size > self._bytes_max:
            self._copies.popitem(last=False)
        self._copies[layer] = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()}

    def get(self, layer: int) -> dict[str, torch.Tensor] | None:
        """What was kept of a layer."""
        copy = self._copies.get(layer)
        if copy is not None:
            self._copies.move_to_end(layer)
        return copy


class Checkpoint:
    """The tensors of each layer in a folder of safetensors; what lies where is looked up once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[int, list[tuple[Path, str]]] | None = None

    def tensors(self, layer: int) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of one layer. Raises FileNotFoundError if it isn't there."""
        from safetensors import safe_open

        places = self._index().get(layer)
        if not places:
            raise FileNotFoundError(f"layer {layer} isn't in a *.safetensors of {self._folder}")
        for path in sorted({path for path, _ in places}):
            with safe_open(path, "pt") as file:
                for name in (name for where, name in places if where == path):
                    yield name, file.get_tensor(name)

    def _index(self) -> dict[int, list[tuple[Path, str]]]:
        from safetensors import safe_open

        if self._places is None:
            places: dict[int, list[tuple[Path, str]]] = {}
            for path in sorted(self._folder.glob("*.safetensors")):
                with safe_open(path, "pt") as file:
                    for name in file.keys():  # noqa: SIM118 - not a dict
                        match = _LAYER_NAME.search(name)
                        if match:
                            places.setdefault(int(match[1]), []).append((path, name))
            self._places = places
        return self._places


class LayerWeights:
    """Loads and drops the layers of one rank's model. One thread at a time."""

    def __init__(self, model: Any, stack: LayerStack, checkpoint: Checkpoint, copies: HostCopies) -> None:
        """`model` is SGLang's, whose part `model` holds the layers."""
        self.stack = stack
        self.copies = copies
        self._model = model
        self._checkpoint = checkpoint

    def load(self, layer: int, stopped: Callable[[], bool]) -> str:
        """Bring a layer's weights in; "host" or "disk". Raises LoadStopped, and whatever reading raises; the layer has
        no memory then."""
        try:
            self.stack.take_memory(layer)
            copy = self.copies.get(layer)
            if copy is None:
                self._read(layer, stopped)
                return "disk"
            for name, parameter in self.stack.parameters(layer).items():
                _go_on(stopped)
                parameter.data.copy_(copy[name])
            return "host"
        except BaseException:
            self.stack.release(layer)
            raise

    def drop(self, layer: int) -> None:
        """Give a layer's memory back; its weights stay in host memory if there is room."""
        self.copies.keep(layer, {name: one.data for name, one in self.stack.parameters(layer).items()})
        self.stack.release(layer)

    def switch(self, start: int, end: int, listed: torch.nn.ModuleList | None = None) -> None:
        """The model computes layers [start, end) from now on. On the step thread. `listed`: as `stack.listed` gives
        for these."""
        from meshift.backends.sglang.plugin.layers.stack import model_range

        inner = self._model.model
        inner.layers = listed if listed is not None else self.stack.listed(start, end)
        inner.start_layer, inner.end_layer = model_range(start, end, len(self.stack))

    def _read(self, layer: int, stopped: Callable[[], bool]) -> None:
        """From the checkpoint, by SGLang's own rules: through a shallow copy of the model that holds this layer
        only."""
        outer, inner = _shallow(self._model), _shallow(self._model.model)
        outer._modules["model"] = inner
        inner._modules["layers"] = self.stack.listed(layer, layer + 1)
        inner.start_layer, inner.end_layer = layer, layer + 1

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self._checkpoint.tensors(layer):
                _go_on(stopped)
                yield name, tensor

        with torch.no_grad():
            outer.load_weights(tensors())
        for module in self.stack.layers[layer].modules():
            method: Any = getattr(module, "quant_method", None)
            if hasattr(method, "process_weights_after_loading"):
                method.process_weights_after_loading(module)


def _go_on(stopped: Callable[[], bool]) -> None:
    if stopped():
        raise LoadStopped


def _shallow(module: Any) -> Any:
    """The same parameters and children, with an attribute dictionary of its own."""
    copy = module.__class__.__new__(module.__class__)
    copy.__dict__ = dict(module.__dict__)
    copy.__dict__["_modules"] = dict(module.__dict__["_modules"])
    return copy
