"""What operators ask of a frontend. All of it is about the whole mesh: any frontend will do."""

from typing import TypeVar

from fastapi import FastAPI, Request
from pydantic import BaseModel

from meshift.schemas.admin import DrainBody, InstanceList, MoveBody, MoveList, RequestList
from meshift.schemas.instances import DrainReply
from meshift.schemas.memory import MemoryBody, MemoryReply
from meshift.schemas.moves import MoveReport
from meshift.services.frontend.api import Operators
from meshift.services.frontend.http import openapi
from meshift.services.frontend.http.body import parse_body, read_body
from meshift.services.frontend.http.settings import HttpSettings

BodyT = TypeVar("BodyT", bound=BaseModel)


def add_admin_routes(app: FastAPI, operators: Operators, settings: HttpSettings) -> None:
    """`/admin/...`; the middleware in front of them asks for an admin key."""
    _add_views(app, operators)

    async def read(request: Request, kind: type[BodyT]) -> BodyT:
        body = await read_body(request, bytes_max=settings.body_bytes_max, timeout_s=settings.body_timeout_s)
        return parse_body(kind, body)

    @app.post("/admin/instances/{instance_id}/drain", openapi_extra=openapi.DRAIN_ROUTE)
    async def drain(instance_id: str, request: Request) -> DrainReply:
        """Take no more requests, move away those that are there, and leave. Answered when it has begun; its progress is
        in `GET /admin/instances`."""
        return await operators.drain(instance_id, await read(request, DrainBody))

    @app.post("/admin/requests/{request_id}/move", openapi_extra=openapi.MOVE_ROUTE)
    async def move(request_id: str, request: Request) -> MoveReport:
        """Move an open request, whichever frontend's it is. An `outcome` of null: it is under way."""
        return await operators.move(request_id, await read(request, MoveBody))

    @app.post("/admin/instances/{instance_id}/memory", openapi_extra=openapi.MEMORY_ROUTE)
    async def resize_memory(instance_id: str, request: Request) -> MemoryReply:
        """Change an instance's KV capacity while it serves; what was done."""
        return await operators.resize_memory(instance_id, await read(request, MemoryBody))


def _add_views(app: FastAPI, operators: Operators) -> None:
    @app.get("/admin/instances")
    async def instances() -> InstanceList:
        """The live instances: load, moves, drain."""
        return await operators.instances()

    @app.get("/admin/requests", responses=openapi.error_responses("503", "504"))
    async def requests() -> RequestList:
        """The open requests of all frontends."""
        return await operators.requests()

    @app.get("/admin/moves")
    async def moves() -> MoveList:
        """Moves out of each live instance: those under way, and the newest that have ended."""
        return await operators.moves()

    @app.get("/admin/instances/{instance_id}/memory", responses=openapi.error_responses("404", "503", "504"))
    async def memory(instance_id: str) -> MemoryReply:
        """An instance's KV memory, in tokens, pages, units and bytes."""
        return await operators.memory(instance_id)
