"""Token events of one boundary, collected and delivered together."""

from collections.abc import Callable

from meshift.backends.base import TokenEvent
from meshift.backends.sim.request import SimRequest
from meshift.schemas.requests import Finish


class Emission:
    """Knows from each request what its listener has."""

    def __init__(self, put: Callable[[list[TokenEvent]], None]) -> None:
        self._put = put
        self._events: list[TokenEvent] = []

    def progress(self, request: SimRequest, generated: int) -> None:
        """Tokens up to `generated` of its output exist."""
        if generated > request.emitted:
            self._events.append(self._event(request, generated, None))
            request.emitted = generated

    def finish(self, request: SimRequest, cancelled: bool) -> None:
        """It ends, with the tokens that weren't delivered yet."""
        self._events.append(self._event(request, request.generated, request.finish(cancelled)))

    @staticmethod
    def _event(request: SimRequest, end: int, finish: Finish | None) -> TokenEvent:
        start, generation = request.emitted, request.generation
        tokens = generation.output(start, end)
        logprobs = generation.logprobs(start, end) if generation.wants_logprobs else None
        queued_ns = None
        if tokens:
            queued_ns, request.queued_ns = request.queued_ns, None
        return TokenEvent(request.key, start, tokens, finish, logprobs, queued_ns)

    def deliver(self) -> None:
        """Hand over what was collected."""
        if self._events:
            events, self._events = self._events, []
            self._put(events)
