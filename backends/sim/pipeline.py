"""The simulated engine's pipeline: which stage holds which layers, how fast that is, and what memory it takes."""

from itertools import pairwise
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from meshift.backends.layouts import StageMemory
from meshift.backends.sim.parameters import SimParameters, StepCost
from meshift.kv_memory.layout import Range
from meshift.schemas.layouts import counts_of, split_of


class SimStage(BaseModel):
    """The hardware of one stage. Speeds are relative to that of the engine's parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory_bytes: int | None = Field(default=None, ge=0)
    """For layers' weights and KV. None: unbounded."""
    reserve_bytes: int = Field(default=0, ge=0)
    decode_speed: float = Field(default=1.0, gt=0.0)
    prefill_speed: float = Field(default=1.0, gt=0.0)


class SimPipeline(BaseModel):
    """Stages, and what a change of their layers takes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: tuple[int, ...] = Field(min_length=1)
    """Of each stage, at the start."""
    stages: tuple[SimStage, ...]
    layers_per_group: int = Field(default=4, ge=1)
    layer_weight_bytes: int = Field(default=400_000_000, ge=0)
    load_bytes_per_s: int = Field(default=8_000_000_000, ge=1)
    """Of weights, into each stage."""
    copy_bytes_per_s: int = Field(default=1_500_000_000, ge=1)
    """Of KV, out of each stage."""
    drain_ns: int = Field(default=3_000_000, ge=0)
    """How long a drained pipeline takes to fill again."""
    lag_ns: int = Field(default=500_000, ge=0)
    """How long a stage takes to switch in its stride."""
    capacity_max: int | None = Field(default=None, ge=1)
    """Tokens. None: what it starts with."""

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        if len(self.layers) != len(self.stages):
            raise ValueError(f"layers of {len(self.layers)} stages, and there are {len(self.stages)}")
        total = sum(self.layers)
        if any(end % self.layers_per_group and end != total for _, end in split_of(self.layers)):
            raise ValueError(f"layers {self.layers} are not whole groups of {self.layers_per_group}")
        return self

    @classmethod
    def even(cls, stages: int, layers: int, layers_per_group: int = 4) -> Self:
        """Alike stages with whole groups of layers, as many in each as can be."""
        groups = -(-layers // layers_per_group)
        bounds = [min(layers, stage * groups // stages * layers_per_group) for stage in range(stages + 1)]
        counts = counts_of(tuple(pairwise(bounds)))
        return cls(layers=counts, stages=tuple(SimStage() for _ in range(stages)), layers_per_group=layers_per_group)

    def faster(self, speed: float) -> Self:
        """The same on hardware `speed` times as fast, beside `SimParameters.faster`."""
        rates = {name: round(getattr(self, name) * speed) for name in ("load_bytes_per_s", "copy_bytes_per_s")}
        times = {name: round(getattr(self, name) / speed) for name in ("drain_ns", "lag_ns")}
        return self.model_copy(update=rates | times)

    @property
    def total(self) -> int:
        """Layers of the model."""
        return sum(self.layers)

    def memory(self, parameters: SimParameters) -> tuple[StageMemory, ...]:
        """What the planner is told."""
        block = self.block_bytes(parameters)
        return tuple(
            StageMemory(stage.memory_bytes, stage.reserve_bytes, self.layer_weight_bytes, block)
            for stage in self.stages
        )

    def block_bytes(self, parameters: SimParameters) -> int:
        """Of one page of one group."""
        return max(1, parameters.kv_token_bytes * parameters.page_size * self.layers_per_group // self.total)

    def kv_bytes(self, parameters: SimParameters, tokens: int, layers: int) -> int:
        """Of that many tokens in that many layers."""
        return parameters.kv_token_bytes * tokens * layers // self.total


class Timing:
    """How long steps take in a layout. The engine works at micro-batches, one a stage that has layers, so that each
    does an n-th of the requests at a time, and all wait for the slowest: of a decode step of S stages, what is paid
    once a micro-batch takes S times as long as in the slowest stage, and what is paid for a request as long as there.
    One stage of speed 1: exactly the parameters."""

    def __init__(self, parameters: SimParameters, pipeline: SimPipeline | None, split: tuple[Range, ...]) -> None:
        self._parameters = parameters
        self._costs = (parameters.step_cost(copying=False), parameters.step_cost(copying=True))
        self._prefill = (1.0, 1.0)
        if pipeline is None:
            return
        total = pipeline.total
        held = [(end - start, stage) for (start, end), stage in zip(split, pipeline.stages, strict=True) if end > start]
        decode = max(layers / total / stage.decode_speed for layers, stage in held)
        prefill = max(layers / total / stage.prefill_speed for layers, stage in held)
        self._prefill = (prefill * len(held), prefill)
        idle, copying = self._costs
        self._costs = (_scaled(idle, decode * len(held), decode), _scaled(copying, decode * len(held), decode))

    def step_cost(self, copying: bool) -> StepCost:
        """Of a decode step."""
        return self._costs[copying]

    def prefill_ns(self, tokens: int, squares: int) -> int:
        """Of a prefill batch."""
        batch, token = self._prefill
        parameters = self._parameters
        work = parameters.prefill_ns(tokens, squares) - parameters.prefill_batch_ns
        if batch == token == 1.0:
            return parameters.prefill_batch_ns + work
        return max(1, round(parameters.prefill_batch_ns * batch + work * token))


def _scaled(cost: StepCost, batch: float, each: float) -> StepCost:
    base, shared = max(1, round(cost.base * batch)), round(cost.shared * batch)
    return StepCost(base, round(cost.request * each), round(cost.token * each), shared)
