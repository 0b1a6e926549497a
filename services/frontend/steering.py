"""A frontend's part in steering: it asks the scheduler for operators, and keeps what they changed of its policy, which
a scheduler that starts again has forgotten."""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

from pydantic import JsonValue

from meshift.schemas import subjects
from meshift.schemas.base import Message
from meshift.schemas.errors import InvalidRequest, MeshError, NotFound, PeerGone, Unavailable
from meshift.schemas.identity import Owner
from meshift.schemas.instances import PolicyStamp, SchedulerReport
from meshift.schemas.limits import DECISIONS_LISTED_MAX
from meshift.schemas.moves import MoveReport, MovesReply, MovesRequest
from meshift.schemas.steering import (
    Changes,
    Decision,
    DecisionsReply,
    DecisionsRequest,
    DecisionSubject,
    KeptPolicy,
    PolicyReply,
    PolicyRequest,
    RequestExplanation,
)
from meshift.services.bus.base import Bus
from meshift.services.frontend.streams import Stream
from meshift.services.instances import InstanceView

logger = logging.getLogger(__name__)

ReplyT = TypeVar("ReplyT", bound=Message)

SCHEDULER = "scheduler"
"""How a scheduler that doesn't answer is named."""


class Steering:
    """Implements `api.Steering`. `streams`: this frontend's own, by request."""

    def __init__(self, bus: Bus, view: InstanceView, streams: Mapping[str, Stream], timeout_s: float) -> None:
        self._bus = bus
        self._view = view
        self._streams = streams
        self._timeout_s = timeout_s
        self._kept = KeptPolicy(stamp=PolicyStamp(), changes={})
        self._catching_up = False

    # ---- keeping the policy

    def is_behind(self, report: SchedulerReport) -> bool:
        """A scheduler lives. One whose policy is older than the one kept here is given that; whether its own is newer,
        and to be asked for."""
        if report.policy < self._kept.stamp:
            self._bus.publish(subjects.POLICY_KEPT, self._kept)
        return report.policy > self._kept.stamp and not self._catching_up

    async def catch_up(self) -> None:
        """Ask for the newest policy. What fails is tried again at the scheduler's next report."""
        self._catching_up = True
        try:
            await self.policy()
        except MeshError as error:
            logger.info("the policy is not known yet: %s", error)
        finally:
            self._catching_up = False

    def _keep(self, reply: PolicyReply) -> None:
        if reply.stamp > self._kept.stamp:
            self._kept = KeptPolicy(stamp=reply.stamp, changes=reply.changes)

    # ---- api.Steering

    async def policy(self) -> PolicyReply:
        """See `api.Steering`."""
        return await self.change_policy({})

    async def change_policy(self, changes: Changes) -> PolicyReply:
        """See `api.Steering`. What is kept goes along: a scheduler that has just started may not have been given it."""
        _check_finite("", dict(changes))
        ask = PolicyRequest(changes=dict(changes), kept=self._kept)
        reply = await self._ask_scheduler(subjects.POLICY, ask, PolicyReply)
        self._keep(reply)
        return reply

    async def decisions(self, request: DecisionsRequest) -> DecisionsReply:
        """See `api.Steering`."""
        return await self._ask_scheduler(subjects.DECISIONS, request, DecisionsReply)

    async def explain(self, request_id: str) -> RequestExplanation:
        """See `api.Steering`."""
        asks = DecisionsRequest(request_id=request_id, limit=DECISIONS_LISTED_MAX)
        pairs = DecisionsRequest(subject=DecisionSubject.PAIR, limit=DECISIONS_LISTED_MAX)
        owners = [known.owner for known in self._view]
        (dispatched, paired), told = await asyncio.gather(
            asyncio.gather(self._decisions_or_none(asks), self._decisions_or_none(pairs)),
            asyncio.gather(*map(self._moves_of, owners)),
        )
        moves = [move for reply in told if reply is not None for move in _moves(reply, request_id)]
        silent = [owner.instance_id for owner, reply in zip(owners, told, strict=True) if reply is None]
        explanation = RequestExplanation(
            request_id=request_id,
            owner=self._owner(request_id),
            dispatches=() if dispatched is None else dispatched.decisions[::-1],
            moves=tuple(sorted(moves, key=lambda move: (move.attempt, move.hop))),
            pairs=() if paired is None else _pairs_of(moves, paired.decisions),
            unanswered=(*silent, *([SCHEDULER] if dispatched is None or paired is None else [])),
        )
        if not (explanation.dispatches or explanation.moves or explanation.owner or explanation.unanswered):
            raise NotFound(f"nothing is known of request {request_id!r}, or no more", param="request_id")
        return explanation

    def _owner(self, request_id: str) -> str:
        stream = self._streams.get(request_id)
        return "" if stream is None or stream.owner is None else str(stream.owner)

    async def _decisions_or_none(self, request: DecisionsRequest) -> DecisionsReply | None:
        try:
            return await self.decisions(request)
        except MeshError as error:
            logger.info("the scheduler's decisions are not known: %s", error)
            return None

    async def _moves_of(self, owner: Owner) -> MovesReply | None:
        subject = subjects.worker_moves(owner.instance_id)
        try:
            return await self._bus.request(subject, MovesRequest(), MovesReply, timeout_s=self._timeout_s)
        except MeshError as error:
            logger.info("the moves of %s are not known: %s", owner, error)
            return None

    async def _ask_scheduler(self, subject: str, message: Message, reply_type: type[ReplyT]) -> ReplyT:
        try:
            return await self._bus.request(subject, message, reply_type, timeout_s=self._timeout_s)
        except PeerGone as error:
            raise Unavailable("no scheduler is there; the frontends dispatch by themselves") from error


def _moves(reply: MovesReply, request_id: str) -> list[MoveReport]:
    return [move for move in (*reply.ended, *reply.running) if move.request_id == request_id]


def _pairs_of(moves: Sequence[MoveReport], pairs: Sequence[Decision]) -> tuple[Decision, ...]:
    """Of each way that the request moved, the newest decision that named it."""
    found: dict[int, Decision] = {}
    for move in moves:
        way = f"{move.source} to {move.destination}"
        newest = next((pair for pair in pairs if way in pair.decision.split(", ")), None)
        if newest is not None:
            found[newest.sequence] = newest
    return tuple(found[sequence] for sequence in sorted(found))


def _check_finite(name: str, value: JsonValue) -> None:
    """JSON has neither infinity nor NaN: on the bus they would become null, which is another setting."""
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(f"{name}: a finite number is wanted", param=name)
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_finite(f"{name}.{key}".lstrip("."), inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check_finite(f"{name}.{index}".lstrip("."), inner)
