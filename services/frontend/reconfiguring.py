"""A frontend's part in reconfigurations: it asks the coordinator for operators."""

from typing import Protocol, TypeVar

from meshift.schemas import subjects
from meshift.schemas.base import Message
from meshift.schemas.errors import InvalidRequest, LayoutDeclined, NotFound, PeerGone, Unavailable, Unsupported
from meshift.schemas.layouts import LayoutRefusal
from meshift.schemas.reconfiguring import (
    ReconfigurationsReply,
    ReconfigurationsRequest,
    ReconfigureBody,
    ReconfigureCancel,
    ReconfigureOrder,
    ReconfigureOutcome,
    ReconfigureReport,
)
from meshift.services.bus.base import Bus

ReplyT = TypeVar("ReplyT", bound=Message)

MARGIN_S = 60.0
"""Beyond its deadline: what is being committed is decided first, and what is undone takes a while."""

BAD_TARGETS = frozenset({LayoutRefusal.INVALID, LayoutRefusal.UNALIGNED, LayoutRefusal.UNCHANGED})


class ReconfiguringOptions(Protocol):
    """What is needed of the frontend's options."""

    ask_timeout_s: float
    submit_timeout_s: float


class Reconfiguring:
    """Implements `api.Reconfiguring`."""

    def __init__(self, bus: Bus, options: ReconfiguringOptions) -> None:
        self._bus = bus
        self._options = options

    async def reconfigure(self, instance_id: str, body: ReconfigureBody) -> ReconfigureReport:
        """See `api.Reconfiguring`."""
        order = ReconfigureOrder(instance_id=_checked(instance_id), body=body)
        timeout_s = body.deadline_s + MARGIN_S if body.wait else MARGIN_S
        report = await self._ask(subjects.RECONFIGURE, order, ReconfigureReport, timeout_s)
        if report.outcome is ReconfigureOutcome.REFUSED or (body.dry_run and report.refusal in BAD_TARGETS):
            raise refusal_of(report)
        return report

    async def cancel(self, instance_id: str) -> ReconfigureReport:
        """See `api.Reconfiguring`."""
        cancel = ReconfigureCancel(instance_id=_checked(instance_id))
        timeout_s = self._options.submit_timeout_s
        return await self._ask(subjects.RECONFIGURE_CANCEL, cancel, ReconfigureReport, timeout_s)

    async def reconfigurations(self, instance_id: str | None = None) -> ReconfigurationsReply:
        """See `api.Reconfiguring`."""
        request = ReconfigurationsRequest(instance_id=None if instance_id is None else _checked(instance_id))
        timeout_s = self._options.ask_timeout_s
        return await self._ask(subjects.RECONFIGURATIONS, request, ReconfigurationsReply, timeout_s)

    async def _ask(self, subject: str, message: Message, reply: type[ReplyT], timeout_s: float) -> ReplyT:
        try:
            return await self._bus.request(subject, message, reply, timeout_s=timeout_s)
        except PeerGone as error:
            raise Unavailable("no coordinator is there: `meshift coordinator` runs one") from error


def refusal_of(report: ReconfigureReport) -> InvalidRequest | Unsupported | LayoutDeclined:
    """What the operator is told of one that didn't begin."""
    if report.refusal in BAD_TARGETS:
        return InvalidRequest(report.reason, param="layers")
    if report.refusal is LayoutRefusal.UNSUPPORTED:
        return Unsupported(report.reason, param="instance_id")
    refusal = LayoutRefusal.UNKNOWN if report.refusal is None else report.refusal
    message = f"{report.instance_id} keeps its layout: {report.reason}"
    return LayoutDeclined(message, param="layers", refusal=refusal.value)


def _checked(instance_id: str) -> str:
    try:
        return subjects.check_name(instance_id)
    except ValueError as error:
        raise NotFound(f"there is no instance {instance_id!r}", param="instance_id") from error
