"""Reconfigurations, for operators: the pipeline of a running instance changes shape."""

from fastapi import FastAPI, Request

from meshift.schemas.reconfiguring import ReconfigurationsReply, ReconfigureBody, ReconfigureReport
from meshift.services.frontend.api import Reconfiguring
from meshift.services.frontend.http import openapi
from meshift.services.frontend.http.body import parse_body, read_body
from meshift.services.frontend.http.settings import HttpSettings


def add_layout_routes(app: FastAPI, reconfiguring: Reconfiguring, settings: HttpSettings) -> None:
    """`/admin/reconfigurations` and `/admin/instances/.../reconfigure`."""

    @app.get("/admin/reconfigurations", responses=openapi.SCHEDULER_ERRORS)
    async def reconfigurations() -> ReconfigurationsReply:
        """Changes of layouts that are under way, and the newest that have ended."""
        return await reconfiguring.reconfigurations()

    @app.get("/admin/instances/{instance_id}/reconfigure", responses=openapi.LAYOUT_ERRORS)
    async def progress(instance_id: str) -> ReconfigurationsReply:
        """The same, of one instance."""
        return await reconfiguring.reconfigurations(instance_id)

    @app.post("/admin/instances/{instance_id}/reconfigure", openapi_extra=openapi.RECONFIGURE_ROUTE)
    async def reconfigure(instance_id: str, request: Request) -> ReconfigureReport:
        """Give the instance's stages other layers while it serves. With `dry_run`, only plan it: `plan` tells it in
        words and numbers. An `outcome` of null: it is under way."""
        body = await read_body(request, bytes_max=settings.body_bytes_max, timeout_s=settings.body_timeout_s)
        return await reconfiguring.reconfigure(instance_id, parse_body(ReconfigureBody, body))

    @app.delete("/admin/instances/{instance_id}/reconfigure", responses=openapi.LAYOUT_ERRORS)
    async def cancel(instance_id: str) -> ReconfigureReport:
        """Undo the change that is under way, unless it is too late. Answered at once."""
        return await reconfiguring.cancel(instance_id)
