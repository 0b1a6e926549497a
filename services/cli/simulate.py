"""`meshift simulate`: what a policy would make of a workload, in virtual time, on the mesh's own services."""

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from meshift.services.calibration.file import load_calibration
from meshift.services.calibration.growth import with_growth
from meshift.services.calibration.reading import CalibrationFileError
from meshift.services.cli.errors import EXIT_ERROR, CommandError
from meshift.services.cli.settings import parse_settings
from meshift.services.scheduler.policy.settings import PolicyName
from meshift.services.simulation.measures import Measures, prefill_s
from meshift.services.simulation.plot import distribution_chart
from meshift.services.simulation.scenario import Cluster, ScenarioError, Workload
from meshift.services.simulation.serving_run import ServingResult, run_serving
from meshift.services.simulation.traces import TraceError
from meshift.services.simulation.workload import Arrival


class SimulateSettings(Workload, Cluster):
    """Serve a workload on a simulated cluster and say what its clients would see. Of several policies each serves the
    same requests."""

    calibration: Path | None = Field(
        None,
        description="file of `meshift calibrate`: engine, classes, costs of headroom, where no flag says otherwise",
    )
    policy: tuple[PolicyName, ...] = Field(("meshift",), min_length=1, description="policies to try, one after another")
    json_path: Path | None = Field(None, alias="json", description="write all figures here")
    plot: Path | None = Field(None, description="draw the distribution of the prefill latency here, as SVG")
    quiet: bool = Field(False, description="no progress bar")


def main(name: str, arguments: list[str]) -> int:
    """Run it and print the table."""
    settings = parse_settings(SimulateSettings, f"meshift {name}", arguments)
    try:
        settings = calibrated(settings)
        arrivals = settings.arrivals(settings.tokens_max)
        for policy in settings.policy:
            settings.options(policy, settings.seed)
    except (ScenarioError, TraceError, CalibrationFileError, OSError) as error:
        raise CommandError(str(error), EXIT_ERROR) from error
    left_out = settings.requests - len(arrivals)
    print(f"{len(arrivals)} requests of {settings.trace} on {settings.instances} instances, seed {settings.seed}")
    if left_out > 0:
        print(f"{left_out} of the {settings.requests} are missing: not in the trace, or too long for an instance")
    results = {policy: _run(settings, policy, arrivals) for policy in settings.policy}
    measures = {policy: result.measures() for policy, result in results.items()}
    print_measures(measures)
    _write(settings, results, measures)
    return 0


def calibrated(settings: SimulateSettings) -> SimulateSettings:
    """What was measured; single figures that were given by flag stay. Raises CalibrationFileError."""
    if settings.calibration is None:
        return settings
    measured = load_calibration(settings.calibration)
    given = {name: getattr(settings.engine, name) for name in settings.engine.model_fields_set}
    usage = settings.usage if "usage" in settings.model_fields_set else measured.virtual_usage
    engine = measured.parameters.model_copy(update=given)
    scheduling = with_growth(settings.scheduling, measured.step_growth)
    return settings.model_copy(update={"engine": engine, "usage": usage, "scheduling": scheduling})


def _run(settings: SimulateSettings, policy: PolicyName, arrivals: list[Arrival]) -> ServingResult:
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=settings.quiet or not console.is_terminal) as bar:
        task = bar.add_task(policy, total=len(arrivals))
        options = settings.options(policy, settings.seed)
        return run_serving(options, arrivals, on_done=lambda count: bar.update(task, completed=count))


def print_measures(by_policy: dict[PolicyName, Measures]) -> None:
    """A column a policy."""
    columns = [_column(measures) for measures in by_policy.values()]
    titles = ["", *by_policy]
    rows = [[label, *(column[label] for column in columns)] for label in columns[0]]
    widths = [max(len(row[index]) for row in [titles, *rows]) for index in range(len(titles))]
    for row in [titles, *rows]:
        print(row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)))


def _column(measures: Measures) -> dict[str, str]:
    column = {}
    for label, spread, unit in (
        ("prefill", measures.prefill_s, "s"),
        ("decode", measures.decode_ms, "ms/token"),
        ("end to end", measures.end_to_end_s, "s"),
    ):
        for name, value in (("mean", spread.mean), ("P50", spread.p50), ("P99", spread.p99)):
            column[f"{label} {name}, {unit}"] = f"{value:.3f}" if unit == "s" else f"{value:.1f}"
    column["waited, preemptions included, P99, s"] = f"{measures.waited_s.p99:.3f}"
    column["preemption loss mean, s"] = f"{measures.preemption_loss_s_mean:.3f}"
    column["requests preempted"] = f"{measures.preempted_share:.2%}"
    column["moves a request"] = f"{measures.moves_per_request:.4f}"
    column["reversed moves"] = str(measures.reversed_moves)
    column["memory used"] = f"{measures.used_share:.1%}"
    column["memory fragmented"] = f"{measures.fragmented_share:.2%}"
    column["time with negative freeness"] = f"{measures.negative_freeness_share:.2%}"
    column["simulated time, s"] = f"{measures.virtual_s:.0f}"
    return column


def _write(
    settings: SimulateSettings, results: dict[PolicyName, ServingResult], measures: dict[PolicyName, Measures]
) -> None:
    if settings.json_path is not None:
        told = settings.model_dump(mode="json", exclude={"json_path", "plot", "quiet", "engine"})
        figures = {
            "parameters_hash": settings.parameters_hash(),
            "scenario": told,
            "policies": {policy: value.model_dump() for policy, value in measures.items()},
            "by_priority": {
                policy: {str(key): value.model_dump() for key, value in result.measures_by_priority().items()}
                for policy, result in results.items()
            },
        }
        settings.json_path.write_text(json.dumps(figures, indent=2) + "\n")
    if settings.plot is not None:
        series: dict[str, Sequence[float]] = {policy: _prefills(result) for policy, result in results.items()}
        title = f"{settings.trace}, {len(next(iter(series.values())))} requests, {settings.instances} instances"
        settings.plot.write_text(distribution_chart(title, "prefill latency, s", series))


def _prefills(result: ServingResult) -> Sequence[float]:
    return [prefill_s(outcome) for outcome in result.outcomes]
