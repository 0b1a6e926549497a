"""Finding an owner for a stream, the first time and after a loss."""

import asyncio
from typing import Protocol

from meshift.schemas import subjects
from meshift.schemas.base import pack_tokens
from meshift.schemas.errors import (
    CallerError,
    InternalError,
    MeshError,
    NotFound,
    OverloadError,
    PeerError,
    PeerTimeout,
)
from meshift.schemas.identity import FrontendRef, Owner
from meshift.schemas.requests import Submit, SubmitReply
from meshift.services.bus.base import Bus
from meshift.services.frontend.answers import Answers
from meshift.services.frontend.dispatch import Dispatcher
from meshift.services.frontend.streams import Stream, StreamEvent, StreamState


class PlacementOptions(Protocol):
    """What placement needs of the frontend's options."""

    submit_timeout_s: float
    place_deadline_s: float
    resume_deadline_s: float
    retry_s: float


class Placement:
    """Dispatch and submit, until an owner has it."""

    def __init__(
        self,
        bus: Bus,
        frontend: FrontendRef,
        dispatcher: Dispatcher,
        answers: Answers,
        options: PlacementOptions,
    ) -> None:
        self._bus = bus
        self._frontend = frontend
        self._dispatcher = dispatcher
        self._answers = answers
        self._options = options

    async def place_new(self, stream: Stream) -> None:
        """For a request that nobody has yet. Raises what the client is to know."""
        await self._place(stream, [], self._options.place_deadline_s, patient=False)

    async def place_again(self, stream: Stream) -> None:
        """For a stream that lost its owner: prompt and tokens so far go elsewhere. Patient: the client waits already,
        and an instance may be about to come back."""
        lost = [stream.owner] if stream.owner is not None else []
        await self._place(stream, lost, self._options.resume_deadline_s, patient=True)

    async def _place(self, stream: Stream, excluded: list[Owner], deadline_s: float, *, patient: bool) -> None:
        until_s = self._now_s() + deadline_s
        refusal: MeshError | None = None
        while stream.state is StreamState.SUBMITTING:
            try:
                owner = await self._dispatcher.choose(stream, excluded)
            except (OverloadError, NotFound) as error:
                refusal = self._worse(refusal, error)
                if self._now_s() >= until_s or not (patient or excluded):
                    raise refusal from None
                excluded = []
                await asyncio.sleep(self._options.retry_s)
                continue
            if owner is None or stream.state is not StreamState.SUBMITTING:
                return
            refusal = await self._submit(stream, owner)
            if refusal is None:
                return
            excluded = [*excluded, owner]
            if self._now_s() >= until_s:
                raise refusal

    @staticmethod
    def _worse(refusal: MeshError | None, error: MeshError) -> MeshError:
        """What an instance said itself tells the client more than that none is left to ask."""
        return refusal if isinstance(refusal, OverloadError) else error

    async def _submit(self, stream: Stream, owner: Owner) -> MeshError | None:
        """Try one owner: None if it has the request, else why another is to be tried. Raises a CallerError."""
        key = stream.begin_attempt(owner, self._now_s())
        subject = subjects.worker_submit(owner.instance_id)
        try:
            with stream.trace.submit(key, owner, len(stream.output)):
                submit = self._message(stream, owner)
                await self._bus.request(subject, submit, SubmitReply, timeout_s=self._options.submit_timeout_s)
        except CallerError:
            raise
        except (PeerError, OverloadError, InternalError) as error:
            if stream.key != key or stream.ended:
                return None
            if not stream.heard_owner:
                if isinstance(error, PeerTimeout | InternalError):
                    self._answers.cancel(owner, key)
                return error
            # The answer was lost, but its tokens arrive: it has the request.
        if stream.key == key and stream.state is StreamState.SUBMITTING:
            stream.enter(StreamEvent.ACCEPTED)
        return None

    def _message(self, stream: Stream, owner: Owner) -> Submit:
        request = stream.request
        return Submit(
            request_id=request.request_id,
            attempt=stream.attempt,
            owner=owner,
            frontend=self._frontend,
            prompt=pack_tokens(request.prompt),
            output=stream.output.tobytes(),
            sampling=request.sampling,
            priority=request.priority,
        )

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()
