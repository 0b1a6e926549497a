"""Asking an owner for tokens that a stream misses, and what its answer, or its silence, means."""

from collections.abc import Coroutine
from typing import Protocol

from meshift.schemas import subjects
from meshift.schemas.base import unpack_tokens
from meshift.schemas.errors import MeshError, PeerGone
from meshift.schemas.identity import Owner, RequestKey
from meshift.schemas.requests import ReplayReply, ReplayRequest, ReplayState
from meshift.services.bus.base import Bus
from meshift.services.frontend.counters import FrontendCounters
from meshift.services.frontend.streams import Stream, StreamState
from meshift.services.instances import InstanceView
from meshift.tracing import names

ASKS_FAILED_MAX = 3
"""Unanswered questions after which an owner is taken for lost."""


class AskOptions(Protocol):
    """What asking needs of the frontend's options."""

    ask_timeout_s: float
    silence_s: float


class AskingCore(Protocol):
    """What asking needs of the frontend's core."""

    def spawn(self, work: Coroutine[None, None, None], stream: Stream | None = None) -> None:
        """Run it, in the stream's trace."""

    def take_replay(self, stream: Stream, reply: ReplayReply, *, former: bool) -> None:
        """Take an answer's tokens."""

    def resume(self, stream: Stream, why: str) -> None:
        """Its owner is lost."""

    def now_s(self) -> float:
        """The loop's."""


class Asks:
    """One question a stream at a time."""

    def __init__(
        self, bus: Bus, core: AskingCore, view: InstanceView, options: AskOptions, counters: FrontendCounters
    ) -> None:
        self._bus = bus
        self._core = core
        self._view = view
        self._options = options
        self._counters = counters

    def ask(self, stream: Stream) -> None:
        """For all from the first missing token on, unless a question is on its way."""
        if not stream.asking and stream.state is StreamState.RUNNING:
            stream.asking = True
            self._core.spawn(self._ask(stream), stream)

    async def _ask(self, stream: Stream) -> None:
        present = stream.key
        key, owner = stream.whom_to_ask()
        try:
            reply = await self._request(stream, key, owner)
        except MeshError as error:
            self._counters.asks_failed += 1
            stream.asking = False
            if stream.key == present and stream.state is StreamState.RUNNING:
                self._failed(stream, key, owner, error)
            return
        self._counters.asks_answered += 1
        stream.asking = False
        if stream.key == present and stream.state is StreamState.RUNNING:
            self._answered(stream, key, reply)

    async def _request(self, stream: Stream, key: RequestKey, owner: Owner) -> ReplayReply:
        request = ReplayRequest(
            request_id=key.request_id, attempt=key.attempt, hop=key.hop, owner=owner, start=len(stream.output)
        )
        with stream.trace.step(names.ASK, {names.OWNER: str(owner), names.ATTEMPT: key.attempt}):
            return await self._bus.request(
                subjects.worker_replay(owner.instance_id), request, ReplayReply, timeout_s=self._options.ask_timeout_s
            )

    def _failed(self, stream: Stream, key: RequestKey, owner: Owner, error: MeshError) -> None:
        if key != stream.key:
            self._ask_the_new(stream)
            return
        stream.asks_failed += 1
        known = self._view.get(owner)
        silent_s = self._core.now_s() - known.seen_s if known is not None else self._options.silence_s
        # Nobody serves the owner's subject and it doesn't report: it is dead, no need to wait for more.
        dead = isinstance(error, PeerGone) and silent_s >= self._options.silence_s
        if dead or stream.asks_failed >= ASKS_FAILED_MAX:
            self._core.resume(stream, f"doesn't answer: {error}")

    def _answered(self, stream: Stream, key: RequestKey, reply: ReplayReply) -> None:
        if key != stream.key:
            if reply.state is not ReplayState.UNKNOWN:
                self._core.take_replay(stream, reply, former=True)
            self._ask_the_new(stream)
        elif reply.state is ReplayState.UNKNOWN or (reply.state is ReplayState.MOVED and reply.moved_to is None):
            self._core.resume(stream, "its owner doesn't know it")
        else:
            self._core.take_replay(stream, reply, former=False)
            if reply.state is ReplayState.MOVED and not stream.ended:
                self._follow(stream, reply)
            elif reply.state is ReplayState.FINISHED and reply.finish is None and reply.tokens:
                self.ask(stream)

    def _follow(self, stream: Stream, reply: ReplayReply) -> None:
        """Its owner says where it went, before the new one was heard."""
        assert reply.moved_to is not None, "looked at before"
        end = reply.start + len(unpack_tokens(reply.tokens))
        stream.adopt(reply.hop, reply.moved_to, end, self._core.now_s())
        self.ask(stream)

    def _ask_the_new(self, stream: Stream) -> None:
        if stream.former is not None:
            stream.former.asked = True
        if stream.has_gap:
            self.ask(stream)
