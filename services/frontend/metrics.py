"""The frontend's metrics, and those of the instances whose reports it hears."""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from meshift.schemas.instances import InstanceState, LoadReport
from meshift.services.exposition import counter, gauge, histogram
from meshift.services.frontend.core import FrontendCore
from meshift.services.frontend.http.observing import HttpCounters
from meshift.services.scheduler.policy.freeness import dispatch_freeness
from meshift.services.scheduler.policy.observation import InstanceObservation
from meshift.tracing import metrics


class FrontendCollector(Collector):
    """Reads when it is asked."""

    def __init__(self, core: FrontendCore, http: HttpCounters) -> None:
        self._core = core
        self._http = http

    def collect(self) -> Iterator[Family]:
        """Called by the registry."""
        yield from self._streams()
        yield from self._losses()
        yield counter(
            metrics.HTTP_REQUESTS, {(route, str(code)): n for (route, code), n in self._http.requests.items()}
        )
        yield histogram(metrics.HTTP_DURATION, {(route,): value for route, value in self._http.durations.items()})
        yield from instance_families(self._core.instances())

    def _streams(self) -> Iterator[Family]:
        counters = self._core.counters
        yield gauge(metrics.OPEN_STREAMS, self._core.open_streams())
        yield counter(metrics.STREAMS_ENDED, {(reason,): count for reason, count in counters.ended.items()})
        yield counter(metrics.TOKENS, {("input",): counters.input_tokens, ("output",): counters.output_tokens})
        yield histogram(metrics.TIME_TO_FIRST_TOKEN, counters.time_to_first_token)
        yield histogram(metrics.INTER_TOKEN, counters.inter_token)
        yield histogram(metrics.TIME_PER_OUTPUT_TOKEN, counters.time_per_output_token)
        yield histogram(metrics.REQUEST_DURATION, counters.request_duration)

    def _losses(self) -> Iterator[Family]:
        counters = self._core.counters
        yield counter(metrics.RESUMES, counters.resumes)
        yield counter(metrics.STALE_EVENTS, counters.stale_events)
        yield counter(metrics.ASKS, {("answered",): counters.asks_answered, ("failed",): counters.asks_failed})
        yield counter(
            metrics.PLACEMENTS,
            {("scheduler",): counters.placed_by_scheduler, ("bypass",): counters.placed_in_bypass},
        )
        yield gauge(metrics.BYPASS, 0 if self._core.scheduler_alive() else 1)


def instance_families(reports: list[LoadReport]) -> Iterator[Family]:
    """Of the instances that live now: one that is gone leaves no series behind."""
    tokens: dict[tuple[str, ...], float] = {}
    requests: dict[tuple[str, ...], float] = {}
    states: dict[tuple[str, ...], float] = {}
    for report in reports:
        name = report.owner.instance_id
        tokens |= {(name, state): getattr(report, state) for state in ("used", "cached", "free", "reserved")}
        requests |= {(name, state): getattr(report, state) for state in ("running", "waiting")}
        states |= {(name, state.value): float(state is report.state) for state in InstanceState}
    by_name = {report.owner.instance_id: report for report in reports}
    yield gauge(metrics.KV_CAPACITY, {(name,): report.capacity for name, report in by_name.items()})
    yield gauge(metrics.KV_TOKENS, tokens)
    yield gauge(metrics.REQUESTS, requests)
    freeness: dict[tuple[str, ...], float] = {
        (name,): dispatch_freeness(InstanceObservation(report)) for name, report in by_name.items()
    }
    yield gauge(metrics.FREENESS, freeness)
    yield gauge(metrics.INSTANCE_STATE, states)
