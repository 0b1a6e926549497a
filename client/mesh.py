"""A typed client of a frontend: REST and admin.

Asynchronous, because streams are what it is for: a stream is left, and by that cancelled on its instance, by leaving
the loop; and many run side by side in one thread. A program without an event loop wraps its calls in `asyncio.run`.

    async with MeshClient("http://127.0.0.1:8000") as mesh:
        model = (await mesh.models())[0].id
        async for event in mesh.stream_chat(model, [{"role": "user", "content": "Hello"}]):
            print(event.text, end="")

Errors are the mesh's own (`meshift.schemas.errors`): what a frontend says, `PeerGone` and `PeerTimeout` if it can't be
reached, doesn't answer, or breaks off.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import httpx
from pydantic import BaseModel, ValidationError

from meshift.client.answers import Chat, Model, ModelList
from meshift.client.errors import broken, refusal
from meshift.schemas.admin import (
    DrainBody,
    InstanceList,
    InstanceStatus,
    MoveBody,
    MoveList,
    OpenRequest,
    RequestList,
)
from meshift.schemas.errors import InternalError, PeerGone
from meshift.schemas.instances import DrainReply
from meshift.schemas.memory import MemoryBody, MemoryReply
from meshift.schemas.moves import MoveMode, MoveReport
from meshift.schemas.reconfiguring import ReconfigurationsReply, ReconfigureBody, ReconfigureReport
from meshift.schemas.steering import Changes, DecisionsReply, DecisionSubject, PolicyReply, RequestExplanation

CONNECT_TIMEOUT_S = 5.0
SILENCE_MAX_S = 120.0
"""Between two pieces of an answer; a request that is moved or resumed pauses."""

MOVE_MARGIN_S = 60.0
"""Beyond its deadline, a move is decided by then."""

AnswerT = TypeVar("AnswerT", bound=BaseModel)


class MeshClient:
    """One frontend, or a load balancer before several. Use as an async context manager."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        silence_s: float = SILENCE_MAX_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`transport`: for tests, another one than the network."""
        self.url = url.rstrip("/")
        self._keys = {"/v1": api_key, "/admin": admin_key}
        self._silence_s = silence_s
        self._http = httpx.AsyncClient(base_url=self.url, transport=transport)

    async def __aenter__(self) -> "MeshClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._http.aclose()

    # ---- REST

    async def models(self) -> list[Model]:
        """The models that are served."""
        return (await self._ask(ModelList, "GET", "/v1/models")).data

    async def chat(self, model: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> Chat:
        """A whole answer. `options` are further fields of the request."""
        body = {"model": model, "messages": list(messages), **options}
        return await self._ask(Chat, "POST", "/v1/chat/completions", body)

    async def stream_chat(
        self, model: str, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> AsyncGenerator[Chat, None]:
        """An answer as it comes. To leave it early, close the generator: that cancels the request."""
        body = {"model": model, "messages": list(messages), **options, "stream": True}
        async with self._send("POST", "/v1/chat/completions", body) as response:
            async for data in self._events(response):
                yield self._parse(Chat, data)

    # ---- admin

    async def instances(self) -> Sequence[InstanceStatus]:
        """The live instances: load, moves, drain."""
        return (await self.instance_list()).data

    async def instance_list(self) -> InstanceList:
        """The same, as it was answered."""
        return await self._ask(InstanceList, "GET", "/admin/instances")

    async def open_requests(self) -> Sequence[OpenRequest]:
        """The open requests of all frontends."""
        return (await self.request_list()).data

    async def request_list(self) -> RequestList:
        """The same, with how many there are and whose are missing."""
        return await self._ask(RequestList, "GET", "/admin/requests")

    async def moves(self) -> MoveList:
        """Moves out of each live instance: those under way, and the newest that have ended."""
        return await self._ask(MoveList, "GET", "/admin/moves")

    async def move(
        self,
        request_id: str,
        destination: str | None = None,
        *,
        mode: MoveMode = MoveMode.LIVE,
        deadline_s: float = 30.0,
        wait: bool = True,
    ) -> MoveReport:
        """Move an open request to an instance, or to wherever there is room. Returns when the move has ended, well or
        not: `outcome` says; without `wait` when it has begun. Raises `MoveDeclined` if it doesn't begin, `NotFound`."""
        path = f"/admin/requests/{quote(request_id, safe='')}/move"
        body = MoveBody(destination=destination, mode=mode, deadline_s=deadline_s, wait=wait)
        return await self._ask(MoveReport, "POST", path, body.model_dump(), patience_s=deadline_s + MOVE_MARGIN_S)

    async def drain(
        self, instance_id: str, deadline_s: float | None = 30.0, *, force: bool = False, restart: bool = False
    ) -> DrainReply:
        """Let an instance move its requests away and leave. Returns when it has begun: `instances` tells how far it
        is."""
        path = f"/admin/instances/{quote(instance_id, safe='')}/drain"
        body = DrainBody(deadline_s=deadline_s, force=force, restart=restart)
        return await self._ask(DrainReply, "POST", path, body.model_dump())

    async def memory(self, instance_id: str) -> MemoryReply:
        """An instance's KV memory, in tokens, pages, units and bytes."""
        return await self._ask(MemoryReply, "GET", f"/admin/instances/{quote(instance_id, safe='')}/memory")

    async def resize_memory(self, instance_id: str, body: MemoryBody) -> MemoryReply:
        """Change an instance's KV capacity while it serves; what was done."""
        path = f"/admin/instances/{quote(instance_id, safe='')}/memory"
        return await self._ask(MemoryReply, "POST", path, body.model_dump())

    async def reconfigure(self, instance_id: str, body: ReconfigureBody) -> ReconfigureReport:
        """Give an instance's stages other layers while it serves. Returns when it has begun, or, with `body.wait`, has
        ended: `outcome` says how. Raises `InvalidRequest` for a bad split, `LayoutDeclined` if it doesn't begin,
        `NotFound`."""
        path = f"/admin/instances/{quote(instance_id, safe='')}/reconfigure"
        patience_s = body.deadline_s + MOVE_MARGIN_S if body.wait else 0.0
        return await self._ask(ReconfigureReport, "POST", path, body.model_dump(mode="json"), patience_s=patience_s)

    async def cancel_reconfigure(self, instance_id: str) -> ReconfigureReport:
        """Undo the change that is under way, unless it is too late. Returns at once; raises `NotFound` if there is
        none."""
        path = f"/admin/instances/{quote(instance_id, safe='')}/reconfigure"
        return await self._ask(ReconfigureReport, "DELETE", path)

    async def reconfigurations(self, instance_id: str | None = None) -> ReconfigurationsReply:
        """Changes of layouts that are under way, and the newest that ended; of one instance, or of all."""
        one = "" if instance_id is None else f"/admin/instances/{quote(instance_id, safe='')}/reconfigure"
        return await self._ask(ReconfigurationsReply, "GET", one or "/admin/reconfigurations")

    async def policy(self) -> PolicyReply:
        """The scheduler's policy: all settings by section, and which of them operators changed."""
        return await self._ask(PolicyReply, "GET", "/admin/policy")

    async def change_policy(self, changes: Changes) -> PolicyReply:
        """Change settings, by section, as in `{"migration": {"out_below": 5}}`; the policy that is then in force.
        Raises `InvalidRequest` naming the field."""
        return await self._ask(PolicyReply, "PATCH", "/admin/policy", dict(changes))

    async def decisions(
        self, *, subject: DecisionSubject | None = None, request_id: str | None = None, limit: int = 50
    ) -> DecisionsReply:
        """The scheduler's newest decisions, with what they were made from."""
        query = {"subject": subject, "request_id": request_id, "limit": limit}
        chosen = urlencode({name: value for name, value in query.items() if value is not None})
        return await self._ask(DecisionsReply, "GET", f"/admin/decisions?{chosen}")

    async def explain(self, request_id: str) -> RequestExplanation:
        """Where a request was sent and moved, and why, as far as the mesh remembers."""
        return await self._ask(RequestExplanation, "GET", f"/admin/explain/{quote(request_id, safe='')}")

    # ---- HTTP

    async def _ask(
        self, answer: type[AnswerT], method: str, path: str, body: object = None, *, patience_s: float = 0.0
    ) -> AnswerT:
        async with self._send(method, path, body, patience_s) as response:
            return self._parse(answer, await response.aread())

    @asynccontextmanager
    async def _send(
        self, method: str, path: str, body: object, patience_s: float = 0.0
    ) -> AsyncIterator[httpx.Response]:
        key = self._keys["/admin" if path.startswith("/admin") else "/v1"]
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        try:
            timeout = httpx.Timeout(max(self._silence_s, patience_s), connect=CONNECT_TIMEOUT_S)
            async with self._http.stream(method, path, json=body, headers=headers, timeout=timeout) as response:
                if not response.is_success:
                    raise refusal(response.status_code, await response.aread())
                yield response
        except httpx.HTTPError as error:
            raise broken(error, self.url) from error

    async def _events(self, response: httpx.Response) -> AsyncIterator[str]:
        """The data of server-sent events, until `[DONE]`."""
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            if data.startswith('{"error"'):
                raise refusal(httpx.codes.INTERNAL_SERVER_ERROR, data)
            yield data
        raise PeerGone("the answer broke off")

    def _parse(self, answer: type[AnswerT], data: bytes | str) -> AnswerT:
        try:
            return answer.model_validate_json(data)
        except ValidationError as error:
            raise InternalError(f"{self.url} answers what is no {answer.__name__}") from error
