"""One service's metrics as text."""

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector


class Exposition:
    """A registry with the service's collectors and, beside them, CPU, memory and files of this process."""

    def __init__(self, *collectors: Collector) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        for collector in collectors:
            self.registry.register(collector)
        ProcessCollector(registry=self.registry)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The text and its content type, in the newest form that `accept` (the request's header) allows."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type
