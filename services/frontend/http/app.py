"""The application: routes, error handlers, outermost layer."""

import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from meshift.schemas.errors import MeshError
from meshift.services.frontend.api import Frontend
from meshift.services.frontend.http import openapi
from meshift.services.frontend.http.access import Access, KeyCheck
from meshift.services.frontend.http.admin import add_admin_routes
from meshift.services.frontend.http.body import BodyTooLarge, DrainingResponse
from meshift.services.frontend.http.errors import describe_error
from meshift.services.frontend.http.layouts import add_layout_routes
from meshift.services.frontend.http.middleware import Boundary
from meshift.services.frontend.http.observing import HttpCounters, Observed
from meshift.services.frontend.http.schemas import Health, ModelCard, ModelList, Readiness
from meshift.services.frontend.http.service import CompletionService, find_model
from meshift.services.frontend.http.settings import HttpSettings
from meshift.services.frontend.http.steering import add_steering_routes
from meshift.services.frontend.text.registry import TokenizerRegistry
from meshift.tracing.spans import NO_TRACER, Tracer

RenderMetrics = Callable[[str], tuple[bytes, str]]
"""`Accept` header -> text and content type."""


def _wall_clock_s() -> float:
    return datetime.now(UTC).timestamp()


def _random_id() -> str:
    return uuid.uuid4().hex


def create_app(
    frontend: Frontend,
    tokenizers: TokenizerRegistry,
    settings: HttpSettings,
    *,
    access: Access,
    clock: Callable[[], float] = _wall_clock_s,
    new_id: Callable[[], str] = _random_id,
    tracer: Tracer = NO_TRACER,
    counters: HttpCounters | None = None,
    metrics: RenderMetrics | None = None,
) -> FastAPI:
    """The REST shell of `frontend`, for those whom `access` lets in. `clock` gives Unix seconds for `created`; `new_id`
    a string that is unique among all frontends, of at most 59 letters and digits; `metrics` what `/metrics` shows, if
    it is to be there. The lifespan's end ends the tokeniser threads."""
    completions = CompletionService(frontend, tokenizers, settings, clock=clock)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        completions.close()

    app = FastAPI(
        title="meshift", lifespan=lifespan, redoc_url=None, swagger_ui_oauth2_redirect_url=None, redirect_slashes=False
    )
    app.openapi = lambda: openapi.describe(app)  # type: ignore[method-assign]
    app.state.completions = completions
    app.add_middleware(KeyCheck, access=access)
    app.add_middleware(Boundary, new_id=new_id, retry_after_s=settings.retry_after_s)
    app.add_middleware(Observed, tracer=tracer, counters=counters or HttpCounters())
    _add_error_handlers(app, settings)
    _add_completion_routes(app, completions)
    _add_model_routes(app, frontend, created=int(clock()))
    _add_probe_routes(app, frontend)
    if metrics is not None:
        _add_metrics_route(app, metrics)
    add_admin_routes(app, frontend.operators, settings)
    add_layout_routes(app, frontend.reconfiguring, settings)
    add_steering_routes(app, frontend, settings)
    return app


def _add_metrics_route(app: FastAPI, render: RenderMetrics) -> None:
    @app.get("/metrics")
    async def show_metrics(request: Request) -> Response:
        text, content_type = render(request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})


def _add_error_handlers(app: FastAPI, settings: HttpSettings) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        request_id = request.state.request_id
        response = describe_error(error, request_id=request_id, retry_after_s=settings.retry_after_s).response()
        if isinstance(error, BodyTooLarge):
            return DrainingResponse(response, bytes_max=settings.discard_bytes_max, timeout_s=settings.body_timeout_s)
        return response

    for kind in (MeshError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, answer)


def _add_completion_routes(app: FastAPI, completions: CompletionService) -> None:
    routes = (
        ("/v1/chat/completions", completions.chat, openapi.CHAT_ROUTE),
        ("/v1/completions", completions.text, openapi.TEXT_ROUTE),
    )
    for path, endpoint, extra in routes:
        app.post(path, response_model=None, response_class=Response, openapi_extra=extra)(endpoint)


def _add_model_routes(app: FastAPI, frontend: Frontend, *, created: int) -> None:
    @app.get("/v1/models")
    async def list_models() -> ModelList:
        cards = [
            ModelCard(id=model.name, created=created, max_model_len=model.context_tokens_max)
            for model in frontend.models()
        ]
        return ModelList(data=cards)

    @app.get("/v1/models/{name:path}", responses=openapi.error_responses("404", "503"))
    async def get_model(name: str) -> ModelCard:
        model = find_model(frontend, name)
        return ModelCard(id=model.name, created=created, max_model_len=model.context_tokens_max)


def _add_probe_routes(app: FastAPI, frontend: Frontend) -> None:
    @app.get("/health")
    async def health() -> Health:
        return Health()

    @app.get("/ready", response_model_exclude_none=True, responses={503: {"model": Readiness}})
    async def ready(response: Response) -> Readiness:
        is_ready = frontend.ready()
        response.status_code = 200 if is_ready else 503
        return Readiness(
            status="ready" if is_ready else "not_ready",
            reason=None if is_ready else "no live instance takes requests",
            scheduler="ok" if frontend.scheduler_alive() else "bypass",
            instances=len(frontend.instances()),
        )
