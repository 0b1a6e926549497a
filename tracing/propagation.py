"""Trace context in message headers, W3C form: `traceparent`, and `tracestate` where there is one.

    bus.publish(..., headers=inject())          # sender
    with attach(message.headers): ...           # receiver: spans begun inside are children of the sender's

A process that does no tracing itself passes on what it was given. A malformed header counts as none.
"""

from collections.abc import Mapping
from contextvars import Token
from types import TracebackType

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PROPAGATOR = TraceContextTextMapPropagator()
_TRACEPARENT = "traceparent"


def inject() -> dict[str, str]:
    """Headers for the current context; empty when there is none."""
    headers: dict[str, str] = {}
    if trace.get_current_span().get_span_context().is_valid:
        _PROPAGATOR.inject(headers)
    return headers


class attach:  # noqa: N801 - used as a function, in `with attach(headers):`
    """Context manager: the sender's context is the current one inside. Without a header, nothing changes."""

    __slots__ = ("_context", "_token")

    def __init__(self, headers: Mapping[str, str] | None) -> None:
        self._context: Context | None = None
        self._token: Token[Context] | None = None
        if headers and _TRACEPARENT in headers:
            self._context = _PROPAGATOR.extract(headers, context.get_current())

    def __enter__(self) -> None:
        if self._context is not None:
            self._token = context.attach(self._context)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._token is not None:
            context.detach(self._token)
            self._token = None
