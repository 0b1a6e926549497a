"""What happens to a message that has arrived: the same on every bus, so that services can't tell them apart."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from meshift.schemas.base import Message
from meshift.schemas.errors import ErrorReply, InternalError, InvalidRequest, MeshError, Overloaded
from meshift.schemas.limits import ENDPOINT_CONCURRENCY_MAX
from meshift.services.bus.base import BusCounters, EndpointHandler, Handler, Headers, Propagator
from meshift.services.bus.codec import SharedDecoder, decode
from meshift.services.bus.logs import QuietLog

MessageT = TypeVar("MessageT", bound=Message)

logger = logging.getLogger("meshift.bus")

ERROR_CHARS_MAX = 8_192
"""Of an error's text, what travels to the caller: an error must never be too large to tell."""


class Reception:
    """What all receivers of one bus client share."""

    def __init__(self, client_name: str, propagator: Propagator | None, shared: SharedDecoder | None = None) -> None:
        """With `shared`, the clients of one in-process network validate what they all receive once."""
        self._decode = decode if shared is None else shared.decode
        self.client_name = client_name
        self.propagator = propagator
        self.counters = BusCounters()
        self.log = QuietLog(logger, client_name)

    def inject(self) -> Headers | None:
        """Headers of the current context, for a message that leaves."""
        return self.propagator.inject() if self.propagator is not None else None

    def attach(self, headers: Headers | None) -> AbstractContextManager[object]:
        """The sender's context, for the time its message is handled."""
        if self.propagator is None or not headers:
            return nullcontext()
        return self.propagator.attach(headers)

    def open(self, subject: str, message_type: type[MessageT], payload: bytes | Message) -> MessageT:
        """Validate an encoded message, or check the type of one passed as an object. Counts; raises
        `InvalidRequest`."""
        self.counters.received += 1
        if isinstance(payload, message_type):
            return payload
        try:
            if isinstance(payload, bytes):
                return self._decode(message_type, payload)
            raise InvalidRequest(f"not a {message_type.__name__} but a {type(payload).__name__}", param="kind")
        except InvalidRequest as error:
            self.counters.invalid += 1
            self.log.report(("invalid", subject), f"message on {subject} refused: {error}")
            raise

    def handler_failed(self, subject: str, error: Exception) -> None:
        """Count and log what a handler raised."""
        self.counters.handler_errors += 1
        key = ("handler", subject, type(error))
        self.log.report(key, f"handler of {subject} raised {type(error).__name__}", error)


class Subscriber(Generic[MessageT]):
    """A subscription's receiving end."""

    def __init__(
        self, reception: Reception, subject: str, message_type: type[MessageT], handler: Handler[MessageT]
    ) -> None:
        self.subject = subject
        self.closed = False
        self._reception = reception
        self._message_type = message_type
        self._handler = handler

    def deliver(self, payload: bytes | Message, headers: Headers | None) -> None:
        """Hand one message to the handler. Raises nothing that the handler raises."""
        if self.closed:
            return
        reception = self._reception
        try:
            message = reception.open(self.subject, self._message_type, payload)
        except InvalidRequest:
            return
        try:
            if headers:
                with reception.attach(headers):
                    self._handler(message)
            else:
                self._handler(message)
        except Exception as error:
            reception.handler_failed(self.subject, error)


@dataclass(slots=True)
class EndpointStats:
    """What an endpoint has done."""

    finished: int = 0
    errors: int = 0
    overloaded: int = 0
    processing_s: float = 0.0
    last_error: str = ""


class Endpoint(Generic[MessageT]):
    """An endpoint's receiving end. At most `concurrency_max` handlers that await run at once."""

    def __init__(
        self,
        reception: Reception,
        name: str,
        subject: str,
        message_type: type[MessageT],
        handler: EndpointHandler[MessageT],
        *,
        concurrency_max: int = ENDPOINT_CONCURRENCY_MAX,
    ) -> None:
        self.name = name
        self.subject = subject
        self.closed = False
        self.running = 0
        self.stats = EndpointStats()
        self._reception = reception
        self._message_type = message_type
        self._handler = handler
        self._concurrency_max = concurrency_max

    def begin(self, payload: bytes | Message, headers: Headers | None) -> Message | Coroutine[Any, Any, Message]:
        """Answer a request now, or return a coroutine that does. An error becomes an `ErrorReply`."""
        began_s = asyncio.get_running_loop().time()
        try:
            message = self._reception.open(self.subject, self._message_type, payload)
            self._check_free()
            with self._reception.attach(headers):
                answer = self._handler(message)
            if not inspect.isawaitable(answer):
                return self._settle(began_s, _checked(answer))
        except Exception as error:
            return self._settle(began_s, self._refusal(error))
        self.running += 1
        return self._finish(began_s, answer, headers)

    async def _finish(self, began_s: float, answer: Awaitable[Message], headers: Headers | None) -> Message:
        try:
            with self._reception.attach(headers):
                message = _checked(await answer)
            return self._settle(began_s, message)
        except Exception as error:
            return self._settle(began_s, self._refusal(error))
        finally:
            self.running -= 1

    def _settle(self, began_s: float, message: Message) -> Message:
        self.stats.finished += 1
        self.stats.processing_s += asyncio.get_running_loop().time() - began_s
        return message

    def _check_free(self) -> None:
        if self.running >= self._concurrency_max:
            self.stats.overloaded += 1
            raise Overloaded(f"endpoint {self.name} serves {self.running} requests")

    def _refusal(self, error: Exception) -> ErrorReply:
        self.stats.errors += 1
        self.stats.last_error = f"{type(error).__name__}: {error}"
        if isinstance(error, MeshError):
            text = error.message[:ERROR_CHARS_MAX]
            return ErrorReply(code=error.code, message=text, param=error.param)
        self._reception.handler_failed(self.subject, error)
        return ErrorReply.of(InternalError(f"endpoint {self.name} failed: {type(error).__name__}"))


def _checked(answer: object) -> Message:
    if not isinstance(answer, Message):
        raise TypeError(f"the handler gave {type(answer).__name__}, not a message")
    return answer


class Answer(NamedTuple):
    """What comes back to a request: an encoded message, or an object on a bus that passes objects."""

    payload: bytes | Message
    is_error: bool = False


def open_answer(reply_type: type[MessageT], subject: str, answer: Answer) -> MessageT:
    """The answer as a message. Raises what the endpoint raised, and `InternalError` for an answer that isn't one:
    it is the endpoint that is wrong, not the caller."""
    payload = answer.payload
    if answer.is_error:
        raise _opened(ErrorReply, subject, payload).to_exception()
    return _opened(reply_type, subject, payload)


def _opened(message_type: type[MessageT], subject: str, payload: bytes | Message) -> MessageT:
    if isinstance(payload, message_type):
        return payload
    if not isinstance(payload, bytes):
        raise InternalError(f"answer of {subject}: not a {message_type.__name__} but a {type(payload).__name__}")
    try:
        return decode(message_type, payload)
    except InvalidRequest as error:
        raise InternalError(f"answer of {subject}: {error}") from None
