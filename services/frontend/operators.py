"""What operators ask of the mesh, at whichever frontend: its instances, its requests, its moves."""

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from meshift.schemas import subjects
from meshift.schemas.admin import (
    DrainBody,
    InstanceList,
    InstanceStatus,
    MoveBody,
    MoveList,
    OpenRequest,
    RequestList,
    RequestsReply,
    RequestsRequest,
)
from meshift.schemas.errors import MeshError, MoveDeclined, NotFound, PeerGone, PeerTimeout, Stale
from meshift.schemas.identity import FrontendRef, Owner
from meshift.schemas.instances import DrainReply, DrainRequest, LoadReport, StatusRequest, WorkerStatus
from meshift.schemas.limits import REQUESTS_LISTED_MAX
from meshift.schemas.memory import MemoryBody, MemoryReply, MemoryRequest
from meshift.schemas.moves import MoveOrder, MoveOutcome, MoveRefusal, MoveReport, MovesReply, MovesRequest
from meshift.schemas.requests import Lease
from meshift.services.bus.base import Bus
from meshift.services.frontend.streams import Stream
from meshift.services.instances import InstanceView

logger = logging.getLogger(__name__)

NO_DEADLINE_S = 365 * 86_400.0
"""Of a drain that waits for as long as it takes."""

MOVE_MARGIN_S = 30.0
"""Beyond a move's deadline: a commit whose answer was lost is decided first."""

FIND_TRIES = 5
"""A request that moves by itself meanwhile is looked for again."""

HEARD_INTERVALS = 1.5
"""Lease intervals in which every live frontend is heard of."""

AnswerT = TypeVar("AnswerT")


class OperatorOptions(Protocol):
    """What is needed of the frontend's options."""

    ask_timeout_s: float
    submit_timeout_s: float
    retry_s: float
    lease_interval_s: float
    memory_timeout_s: float


class Operators:
    """Of one frontend. `serve` makes it part of the mesh; implements `api.Operators`."""

    def __init__(
        self, bus: Bus, ref: FrontendRef, view: InstanceView, streams: Mapping[str, Stream], options: OperatorOptions
    ) -> None:
        self._bus = bus
        self._ref = ref
        self._view = view
        self._streams = streams
        self._options = options
        self._others: dict[str, tuple[FrontendRef, float]] = {}
        """Frontends beside this one, by id, and until when their leases last."""
        self._begin_s = 0.0

    def serve(self) -> None:
        """Take part on the bus."""
        self._begin_s = self._now_s()
        self._bus.subscribe(subjects.LEASE, Lease, self._on_lease)
        subject = subjects.frontend_requests(self._ref.frontend_id)
        self._bus.serve("requests", subject, RequestsRequest, self._on_requests)

    # ---- instances

    async def instances(self) -> InstanceList:
        """See `api.Operators`."""
        reports = [known.report for known in self._view]
        statuses = await asyncio.gather(*(self._status(report.owner) for report in reports))
        return InstanceList(
            data=tuple(_instance(report, status) for report, status in zip(reports, statuses, strict=True))
        )

    async def drain(self, instance_id: str, body: DrainBody) -> DrainReply:
        """See `api.Operators`."""
        deadline_s = NO_DEADLINE_S if body.deadline_s is None else body.deadline_s
        request = DrainRequest(deadline_s=0.0 if body.force else deadline_s, restart=body.restart)
        try:
            subject = subjects.worker_drain(subjects.check_name(instance_id))
            return await self._bus.request(subject, request, DrainReply, timeout_s=self._options.submit_timeout_s)
        except (ValueError, PeerGone) as error:
            raise _no_instance(instance_id, "instance_id") from error

    async def memory(self, instance_id: str) -> MemoryReply:
        """See `api.Operators`."""
        return await self._ask_memory(instance_id, MemoryRequest())

    async def resize_memory(self, instance_id: str, body: MemoryBody) -> MemoryReply:
        """See `api.Operators`."""
        return await self._ask_memory(instance_id, MemoryRequest(resize=body))

    async def _ask_memory(self, instance_id: str, request: MemoryRequest) -> MemoryReply:
        try:
            subject = subjects.worker_memory(subjects.check_name(instance_id))
            return await self._bus.request(subject, request, MemoryReply, timeout_s=self._options.memory_timeout_s)
        except (ValueError, PeerGone) as error:
            raise _no_instance(instance_id, "instance_id") from error

    async def _status(self, owner: Owner) -> WorkerStatus | None:
        subject = subjects.worker_status(owner.instance_id)
        ask = self._bus.request(subject, StatusRequest(), WorkerStatus, timeout_s=self._options.ask_timeout_s)
        status = await _unless_it_fails(ask)
        return status if status is not None and status.load.owner == owner else None

    # ---- requests

    async def requests(self) -> RequestList:
        """See `api.Operators`."""
        replies, unanswered = await self._ask_frontends(RequestsRequest())
        listed = tuple(request for reply in replies for request in reply.requests)
        return RequestList(data=listed, total=sum(reply.total for reply in replies), unanswered=tuple(unanswered))

    def _on_requests(self, ask: RequestsRequest) -> RequestsReply:
        if ask.request_id is None:
            found = [stream for stream in self._streams.values() if not stream.ended]
        else:
            stream = self._streams.get(ask.request_id)
            found = [] if stream is None or stream.ended else [stream]
        listed = tuple(stream.describe(self._ref) for stream in found[:REQUESTS_LISTED_MAX])
        return RequestsReply(requests=listed, total=len(found))

    async def _ask_frontends(self, ask: RequestsRequest) -> tuple[list[RequestsReply], list[str]]:
        """The answers of all, this one's first, and who lives and didn't answer."""
        await asyncio.sleep(self._begin_s + HEARD_INTERVALS * self._options.lease_interval_s - self._now_s())
        now_s = self._now_s()
        self._others = {name: known for name, known in self._others.items() if now_s < known[1]}
        names = sorted(self._others)
        answers = await asyncio.gather(*(self._ask_frontend(name, ask) for name in names))
        unanswered = [name for name, answer in zip(names, answers, strict=True) if answer is None]
        return [self._on_requests(ask), *(answer for answer in answers if answer is not None)], unanswered

    async def _ask_frontend(self, name: str, ask: RequestsRequest) -> RequestsReply | None:
        subject = subjects.frontend_requests(name)
        try:
            return await self._bus.request(subject, ask, RequestsReply, timeout_s=self._options.ask_timeout_s)
        except PeerGone:
            # It has left, and its requests ended with it.
            self._others.pop(name, None)
            return RequestsReply(requests=(), total=0)
        except MeshError as error:
            logger.warning("frontend %s doesn't tell its requests: %s", name, error)
            return None

    def _on_lease(self, lease: Lease) -> None:
        name, incarnation = lease.frontend
        if name == self._ref.frontend_id:
            return
        known = self._others.get(name)
        if known is None or known[0].incarnation <= incarnation:
            self._others[name] = (lease.frontend, self._now_s() + lease.ttl_s)

    # ---- moves

    async def moves(self) -> MoveList:
        """See `api.Operators`."""
        owners = [known.owner for known in self._view]
        replies = await asyncio.gather(*(_unless_it_fails(self._moves_of(owner)) for owner in owners))
        return MoveList(
            data=tuple(reply for reply in replies if reply is not None),
            unanswered=tuple(owner.instance_id for owner, reply in zip(owners, replies, strict=True) if reply is None),
        )

    async def move(self, request_id: str, body: MoveBody) -> MoveReport:
        """See `api.Operators`."""
        destination = None if body.destination is None else self._live_instance(body.destination)
        refusal, reason = MoveRefusal.UNKNOWN, ""
        for _ in range(FIND_TRIES):
            owner = await self._owner_of(request_id)
            order = MoveOrder(
                owner=owner,
                request_id=request_id,
                destination=destination,
                mode=body.mode,
                deadline_s=body.deadline_s,
                wait=body.wait,
            )
            try:
                report = await self._ordered(order)
            except (PeerGone, Stale) as error:
                refusal, reason = MoveRefusal.STALE, error.message
            else:
                if report.outcome is not MoveOutcome.REFUSED:
                    return report
                refusal, reason = report.refusal or MoveRefusal.UNKNOWN, report.reason
                if refusal is not MoveRefusal.UNKNOWN:
                    break
            await asyncio.sleep(self._options.retry_s)
        raise MoveDeclined(f"{request_id} stays where it is: {reason}", param=_blamed(refusal), refusal=refusal.value)

    def _live_instance(self, name: str) -> Owner:
        for known in self._view:
            if known.owner.instance_id == name:
                return known.owner
        raise _no_instance(name, "destination")

    async def _owner_of(self, request_id: str) -> Owner:
        """Whichever frontend's it is."""
        found = await self._find(request_id)
        if found.owner is None or found.state == "submitting":
            message = f"no instance has {request_id} now: it is new, or its instance was lost"
            raise MoveDeclined(message, param="request_id", refusal=MoveRefusal.BUSY.value)
        return found.owner

    async def _find(self, request_id: str) -> OpenRequest:
        ask = RequestsRequest(request_id=request_id)
        own = self._on_requests(ask).requests
        replies, unanswered = ([], []) if own else await self._ask_frontends(ask)
        found = [*own, *(request for reply in replies for request in reply.requests)]
        if found:
            return found[0]
        if unanswered:
            raise PeerTimeout(f"{request_id} is unknown here, and {', '.join(unanswered)} didn't answer")
        raise NotFound(f"there is no open request {request_id!r}", param="request_id")

    async def _ordered(self, order: MoveOrder) -> MoveReport:
        subject = subjects.worker_move(order.owner.instance_id)
        timeout_s = order.deadline_s + MOVE_MARGIN_S if order.wait else self._options.submit_timeout_s
        return await self._bus.request(subject, order, MoveReport, timeout_s=timeout_s)

    def _moves_of(self, owner: Owner) -> Coroutine[Any, Any, MovesReply]:
        subject = subjects.worker_moves(owner.instance_id)
        return self._bus.request(subject, MovesRequest(), MovesReply, timeout_s=self._options.ask_timeout_s)

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


async def _unless_it_fails(ask: Coroutine[Any, Any, AnswerT]) -> AnswerT | None:
    try:
        return await ask
    except MeshError as error:
        logger.debug("an instance doesn't answer an operator: %s", error)
        return None


def _instance(report: LoadReport, status: WorkerStatus | None) -> InstanceStatus:
    if status is None:
        return InstanceStatus(load=report, answers=False)
    return InstanceStatus(
        load=status.load,
        answers=True,
        engine=status.engine,
        ranks=status.ranks,
        requests=status.requests,
        unacknowledged=status.unacknowledged,
        moves_out=status.moves_out,
        moves_in=status.moves_in,
        drain=status.drain,
    )


def _no_instance(name: str, param: str) -> NotFound:
    return NotFound(f"there is no instance {name!r}", param=param)


_OF_DESTINATION = frozenset(
    {
        MoveRefusal.DRAINING,
        MoveRefusal.INCOMPATIBLE,
        MoveRefusal.NO_DESTINATION,
        MoveRefusal.NO_ROOM,
        MoveRefusal.UNREACHABLE,
    }
)


def _blamed(refusal: MoveRefusal) -> str:
    """The field that another value of might help."""
    return "destination" if refusal in _OF_DESTINATION else "request_id"
