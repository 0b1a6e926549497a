"""The HTTP server that shows metrics. Apart, so that a service that shows none doesn't import one."""

import contextlib
from collections.abc import Generator
from typing import Final

import uvicorn
from prometheus_client import CollectorRegistry, make_asgi_app

STOP_GRACE_S: Final = 2
CONNECTIONS_MAX: Final = 32


class Listener(uvicorn.Server):
    """Answers every path with the metrics of `registry`. Leaves the process' signals alone."""

    def __init__(self, registry: CollectorRegistry) -> None:
        config = uvicorn.Config(
            make_asgi_app(registry),
            lifespan="off",
            loop="none",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=CONNECTIONS_MAX,
            timeout_graceful_shutdown=STOP_GRACE_S,
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
