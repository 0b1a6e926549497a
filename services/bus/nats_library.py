"""nats-py, as far as the bus uses it, and without aiohttp.

Where aiohttp is installed nats-py imports it for WebSocket URLs, which the bus doesn't use: a third of what a service
imports, and a third of a second of each start of a service or a command.
"""
# ruff: noqa: E402, I001 - aiohttp is hidden before, and only while, nats-py is imported.

import sys

_hidden = not {"aiohttp", "nats"} & sys.modules.keys()
if _hidden:
    sys.modules["aiohttp"] = None  # type: ignore[assignment]
try:
    from nats.aio.client import Client, Server
finally:
    if _hidden:
        del sys.modules["aiohttp"]

import nats.errors as errors
from nats.aio.subscription import Subscription
from nats.micro.request import ERROR_CODE_HEADER, ERROR_HEADER
from nats.micro.service import Endpoint as MicroEndpoint
from nats.micro.service import EndpointConfig
from nats.micro.service import EndpointStats as MicroStats
from nats.micro.service import Service as MicroService
from nats.micro.service import ServiceConfig
from nats.nuid import NUID
from nats.protocol.parser import Parser

__all__ = [
    "ERROR_CODE_HEADER",
    "ERROR_HEADER",
    "NUID",
    "Client",
    "EndpointConfig",
    "MicroEndpoint",
    "MicroService",
    "MicroStats",
    "Parser",
    "Server",
    "ServiceConfig",
    "Subscription",
    "errors",
]
