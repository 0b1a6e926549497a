"""The OpenAI-compatible REST shell of the frontend: sockets, JSON and text around the core interface."""

from meshift.services.frontend.http.access import Access, AccessError, make_access, read_keys
from meshift.services.frontend.http.app import create_app
from meshift.services.frontend.http.server import HttpServer, serve
from meshift.services.frontend.http.settings import HttpSettings

__all__ = [
    "Access",
    "AccessError",
    "HttpServer",
    "HttpSettings",
    "create_app",
    "make_access",
    "read_keys",
    "serve",
]
