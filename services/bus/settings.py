"""What can be set about a bus client, whatever the bus."""

from dataclasses import dataclass

from meshift.schemas.limits import (
    ENDPOINT_CONCURRENCY_MAX,
    PUBLISH_QUEUE_MAX,
    REQUESTS_IN_FLIGHT_MAX,
    SUBSCRIPTION_QUEUE_MAX,
)


@dataclass(frozen=True, slots=True)
class BusLimits:
    """Bounds of one bus client."""

    publish_queue_max: int = PUBLISH_QUEUE_MAX
    """Messages that wait for the connection before `publish` refuses."""
    publish_queue_bytes_max: int = 256 * 1024 * 1024
    """The same in bytes; holds only where messages are encoded."""
    subscription_queue_max: int = SUBSCRIPTION_QUEUE_MAX
    """Messages that wait for one subscriber before the bus drops."""
    requests_in_flight_max: int = REQUESTS_IN_FLIGHT_MAX
    endpoint_concurrency_max: int = ENDPOINT_CONCURRENCY_MAX
    close_timeout_s: float = 2.0
    """How long `close` waits for handlers at work, and then for the queue."""
