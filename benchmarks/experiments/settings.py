"""What can be set about an experiment."""

import os
from pathlib import Path

from pydantic import Field

from meshift.benchmarks.report import BenchmarkSettings
from meshift.services.scheduler.policy.settings import POLICIES, PolicyName

FIRST_REPORTED_SEED = 100
"""Policies are tuned on seeds 0-7 and reported on these."""


class ExperimentSettings(BenchmarkSettings):
    """What all experiments share."""

    requests: int = Field(10_000, ge=1, description="requests a run")
    first_seed: int = Field(FIRST_REPORTED_SEED, description="the first seed")
    seeds: int = Field(8, ge=1, description="how many seeds")
    traces: tuple[str, ...] = Field((), description="traces (default: those of the experiment)")
    trace_folder: Path | None = Field(
        None, description="`serving`: where the published traces lie that its matrix names by their files"
    )
    policies: tuple[PolicyName, ...] = Field((), description="policies (default: those of the experiment)")
    targets_s: tuple[int, ...] = Field((5, 10, 30), description="rates: P99 prefill of INFaaS++ there, in s")
    jobs: int | None = Field(
        None, ge=1, description="runs at once, each in a process of its own (default: one a core; with --quick, 1)"
    )
    resume: bool = Field(
        False, description="go on with the file of --json: keep its rows, and do only those runs that it lacks"
    )
    steady: bool = Field(
        False,
        description="`serving`: the requests of 30 minutes after a warm-up of 5, instead of --requests from empty on",
    )
    cold_starts_s: tuple[float, ...] = Field(
        (), description="`autoscale`: how long an instance takes to start (default: those of the experiment)"
    )
    over_nats: bool = Field(True, description="`scalability`: also over a real NATS server")

    @property
    def processes(self) -> int:
        """Runs at once."""
        return self.jobs or (1 if self.quick else os.cpu_count() or 1)

    @property
    def all_policies(self) -> tuple[PolicyName, ...]:
        """Those that differ where all requests are of one class: not `llumnix-base`, which is `llumnix` there, nor the
        one that is there for its cost only."""
        return tuple(policy for policy in POLICIES if policy not in ("central", "llumnix-base"))
