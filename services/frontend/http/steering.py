"""Policy and decisions, for operators."""

from typing import Annotated

from fastapi import FastAPI, Query, Request
from pydantic import JsonValue, RootModel

from meshift.schemas.limits import DECISIONS_LISTED_MAX, REQUEST_ID_CHARS_MAX
from meshift.schemas.steering import (
    DecisionsReply,
    DecisionsRequest,
    DecisionSubject,
    PolicyReply,
    RequestExplanation,
)
from meshift.services.frontend.api import Frontend
from meshift.services.frontend.http import openapi
from meshift.services.frontend.http.body import parse_body, read_body
from meshift.services.frontend.http.settings import HttpSettings


class PolicyBody(RootModel[dict[str, JsonValue]]):
    """Settings by section. The scheduler's own model checks them, so that two releases can't differ about them."""


def add_steering_routes(app: FastAPI, frontend: Frontend, settings: HttpSettings) -> None:
    """`/admin/policy`, `/admin/decisions` and `/admin/explain/...`."""

    @app.get("/admin/policy", responses=openapi.SCHEDULER_ERRORS)
    async def policy() -> PolicyReply:
        return await frontend.steering.policy()

    @app.patch("/admin/policy", openapi_extra=openapi.POLICY_ROUTE)
    async def change_policy(request: Request) -> PolicyReply:
        body = await read_body(request, bytes_max=settings.body_bytes_max, timeout_s=settings.body_timeout_s)
        return await frontend.steering.change_policy(parse_body(PolicyBody, body).root)

    @app.get("/admin/decisions", responses=openapi.SCHEDULER_ERRORS)
    async def decisions(
        subject: DecisionSubject | None = None,
        request_id: Annotated[str | None, Query(min_length=1, max_length=REQUEST_ID_CHARS_MAX)] = None,
        limit: Annotated[int, Query(ge=1, le=DECISIONS_LISTED_MAX)] = 50,
    ) -> DecisionsReply:
        ask = DecisionsRequest(subject=subject, request_id=request_id, limit=limit)
        return await frontend.steering.decisions(ask)

    @app.get("/admin/explain/{request_id}", responses=openapi.EXPLAIN_ERRORS)
    async def explain(request_id: str) -> RequestExplanation:
        return await frontend.steering.explain(request_id[:REQUEST_ID_CHARS_MAX])
