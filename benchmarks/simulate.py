"""The experiments of Llumnix's evaluation, on the simulated mesh: `meshift bench simulate --experiment serving`."""

import importlib
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from meshift.benchmarks.experiments.settings import ExperimentSettings
from meshift.services.cli.errors import EXIT_ERROR, CommandError
from meshift.services.cli.settings import parse_settings
from meshift.services.simulation.scenario import Cluster

Experiment = Literal["serving", "fragmentation", "priority", "autoscale", "combined", "scalability", "resizing"]


class SimulateBenchmarkSettings(ExperimentSettings, Cluster):
    """Simulate clusters under the policies and compare what clients see."""

    experiment: Experiment = Field("serving", description="which one")


def main(arguments: Sequence[str]) -> int:
    """Run it."""
    settings = parse_settings(SimulateBenchmarkSettings, "meshift bench simulate", arguments)
    cluster = Cluster.model_validate(settings.model_dump(include=set(Cluster.model_fields)))
    try:
        importlib.import_module(f"meshift.benchmarks.experiments.{settings.experiment}").run(settings, cluster)
    except ValueError as error:
        raise CommandError(str(error), EXIT_ERROR) from error
    return 0
