"""What is simulated: a workload, a cluster and a policy, and how they are told apart in results."""

import hashlib
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from meshift.backends.sim.engine import DEFAULT_MODEL
from meshift.backends.sim.parameters import SimParameters
from meshift.schemas.errors import InvalidRequest
from meshift.services.scheduler.core import SchedulerOptions
from meshift.services.scheduler.policy.settings import PolicyName, PolicySettings
from meshift.services.simulation.lengths import GENERATED
from meshift.services.simulation.mesh import MeshOptions
from meshift.services.simulation.serving_run import skipped
from meshift.services.simulation.traces import load_trace
from meshift.services.simulation.workload import (
    Arrival,
    fitting,
    from_rows,
    generate,
    pattern_shift,
    replay,
    with_priorities,
)
from meshift.services.worker.options import WorkerOptions
from meshift.services.worker.policy.virtual_usage import VirtualUsageSettings

PATTERN_SHIFT_NAME = "pattern-shift"


class ScenarioError(ValueError):
    """It can't be simulated; the message says why."""


class Workload(BaseModel):
    """Which requests come when."""

    trace: str = Field("S-S", description="a generated trace (S-S, M-M, L-L, sharegpt, ...), or a file")
    requests: Annotated[int, Field(ge=1)] = Field(10_000, description="how many requests")
    rate: Annotated[float, Field(gt=0)] | None = Field(
        None, description="requests a second; a file with times has its own"
    )
    seed: int = Field(0, description="of arrivals, order and prompts")
    cv: float = Field(1.0, gt=0, description="coefficient of variation of the gaps; 1 is Poisson")
    high_share: float = Field(0.0, ge=0, le=1, description="share of requests of high priority")
    shuffle: bool = Field(False, description="take a file's lengths in the seed's order, at times of the seed's own")

    def arrivals(self, tokens_max: int) -> list[Arrival]:
        """The requests that an instance of `tokens_max` tokens can hold. Raises ScenarioError, TraceError, OSError."""
        arrivals = fitting(self._arrivals(), tokens_max)
        if not arrivals:
            raise ScenarioError(f"no request of {self.trace} fits into {tokens_max} tokens")
        return with_priorities(arrivals, {1: self.high_share}, self.seed) if self.high_share else arrivals

    def _arrivals(self) -> list[Arrival]:
        if self.trace in GENERATED:
            return generate(self.trace, self.requests, self._rate(), self.seed, self.cv)
        if self.trace == PATTERN_SHIFT_NAME:
            return pattern_shift(self.requests, self._rate(), self.seed)
        path = Path(self.trace)
        if not path.is_file():
            names = ", ".join((*GENERATED, PATTERN_SHIFT_NAME))
            raise ScenarioError(f"{self.trace} is neither a file nor one of {names}")
        rows = load_trace(path)
        if self.shuffle or rows[0].arrival_s is None:
            return from_rows(rows, self.requests, self._rate(), self.seed, self.cv)
        return replay(rows, self.requests, self.rate)

    def _rate(self) -> float:
        if self.rate is None:
            raise ScenarioError(f"{self.trace} needs a rate")
        return self.rate


class Cluster(BaseModel):
    """What serves them."""

    instances: int = Field(16, ge=1, description="instances")
    frontends: int = Field(1, ge=1, description="frontends")
    engine: SimParameters = Field(default_factory=SimParameters, description="the modelled engine")
    scheduling: PolicySettings = Field(default_factory=PolicySettings, description="the policies' own settings")
    usage: VirtualUsageSettings = Field(
        default_factory=VirtualUsageSettings, description="priority classes and their headroom"
    )

    def options(self, policy: PolicyName, seed: int) -> MeshOptions:
        """A mesh of it, the fast way. Raises ScenarioError if the settings aren't right for that policy."""
        try:
            scheduling = self.scheduling.replaced({"policy": policy})
        except InvalidRequest as error:
            raise ScenarioError(f"{policy}: {error}") from error
        return skipped(
            MeshOptions(
                instances=self.instances,
                frontends=self.frontends,
                seed=seed,
                parameters=self.engine,
                worker=WorkerOptions(virtual_usage=self.usage),
                scheduler=SchedulerOptions(scheduling=scheduling),
            )
        )

    @property
    def tokens_max(self) -> int:
        """The longest request, prompt and output, that can run: the last token's KV is never computed."""
        capacity = self.engine.pages * self.engine.page_size + 1
        return min(capacity, DEFAULT_MODEL.context_tokens_max)

    def parameters_hash(self) -> str:
        """Names engine, cluster and settings in results: 16 hexadecimal digits."""
        told = self.model_dump_json(include=set(Cluster.model_fields), exclude={"scheduling": {"policy", "version"}})
        return hashlib.sha256(told.encode()).hexdigest()[:16]
