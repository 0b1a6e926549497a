"""Token events of one boundary, collected and delivered together."""

from collections.abc import Callable

from meshift.backends.base import TokenEvent
from meshift.backends.sim.request import SimRequest


class Emission:
    """Knows from each request what its listener has."""

    def __init__(self, put: Callable[[list[TokenEvent]], None]) -> None:
        self._put = put
        self._events: list[TokenEvent] = []

    def progress(self, request: SimRequest, generated: int) -> None:
        """Tokens up to `generated` of its output exist."""
        if generated > request.emitted:
            tokens = request.generation.output(request.emitted, generated)
            self._events.append(TokenEvent(request.key, request.emitted, tokens, None, request.queued_ns))
            request.emitted = generated

    def finish(self, request: SimRequest, cancelled: bool) -> None:
        """It ends, with the tokens that weren't delivered yet."""
        tokens = request.generation.output(request.emitted, request.generated)
        finish = request.finish(cancelled)
        self._events.append(TokenEvent(request.key, request.emitted, tokens, finish, request.queued_ns))

    def deliver(self) -> None:
        """Hand over what was collected."""
        if self._events:
            events, self._events = self._events, []
            self._put(events)
