"""The OpenAI-compatible REST shell of the frontend: sockets, JSON and text around the core interface."""

from meshift.services.frontend.http.app import create_app
from meshift.services.frontend.http.server import HttpServer, serve
from meshift.services.frontend.http.settings import HttpSettings

__all__ = ["HttpServer", "HttpSettings", "create_app", "serve"]
