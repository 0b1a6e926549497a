"""What operators ask of a frontend."""

from fastapi import FastAPI, Request

from meshift.schemas.admin import DrainBody, InstanceList, RequestList
from meshift.schemas.errors import NotFound
from meshift.schemas.instances import DrainReply, LoadReport
from meshift.schemas.memory import MemoryBody, MemoryReply
from meshift.services.frontend.api import Frontend
from meshift.services.frontend.http import openapi
from meshift.services.frontend.http.body import parse_body, read_body
from meshift.services.frontend.http.settings import HttpSettings


def add_admin_routes(app: FastAPI, frontend: Frontend, settings: HttpSettings) -> None:
    """`/admin/...`; the middleware in front of them asks for an admin key."""

    @app.get("/admin/instances")
    async def instances() -> InstanceList:
        return InstanceList(data=tuple(frontend.instances()))

    @app.get("/admin/instances/{instance_id}/memory", responses=openapi.MEMORY_ERRORS)
    async def memory(instance_id: str) -> LoadReport:
        for report in frontend.instances():
            if report.owner.instance_id == instance_id:
                return report
        raise NotFound(f"there is no instance {instance_id!r}", param="instance_id")

    @app.post("/admin/instances/{instance_id}/memory", openapi_extra=openapi.MEMORY_ROUTE)
    async def resize_memory(instance_id: str, request: Request) -> MemoryReply:
        body = await read_body(request, bytes_max=settings.body_bytes_max, timeout_s=settings.body_timeout_s)
        return await frontend.resize_memory(instance_id, parse_body(MemoryBody, body))

    @app.get("/admin/requests")
    async def requests() -> RequestList:
        return RequestList(data=tuple(frontend.open_requests()))

    @app.post("/admin/instances/{instance_id}/drain", openapi_extra=openapi.DRAIN_ROUTE)
    async def drain(instance_id: str, request: Request) -> DrainReply:
        body = await read_body(request, bytes_max=settings.body_bytes_max, timeout_s=settings.body_timeout_s)
        return await frontend.drain(instance_id, parse_body(DrainBody, body).deadline_s)
