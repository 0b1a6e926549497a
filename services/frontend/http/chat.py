"""`POST /v1/chat/completions`: from the body to a request for the core."""

from collections.abc import Callable, Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response

from meshift.schemas.errors import InternalError, InvalidRequest, NotFound, Overloaded, Unavailable
from meshift.schemas.instances import ModelInfo
from meshift.services.frontend.api import Frontend, GenerateRequest
from meshift.services.frontend.http.body import INLINE_BYTES_MAX, parse_chat, read_body
from meshift.services.frontend.http.completion import Completion, CompletionBounds, CompletionResponse
from meshift.services.frontend.http.errors import HttpError, describe_error
from meshift.services.frontend.http.sampling import to_priority, to_sampling
from meshift.services.frontend.http.schemas import ChatRequest
from meshift.services.frontend.http.settings import HttpSettings
from meshift.services.frontend.http.workers import WorkerThreads
from meshift.services.frontend.text.output import OutputText
from meshift.services.frontend.text.registry import TokenizerRegistry
from meshift.services.frontend.text.tokenizer import ChatTokenizer, TokenizerError


def find_model(frontend: Frontend, name: str) -> ModelInfo:
    """Raises `NotFound`, or `Unavailable` if no model at all is served yet."""
    models = frontend.models()
    if not models:
        raise Unavailable("no instance serves a model now")
    for model in models:
        if model.name == name:
            return model
    raise NotFound(f"the model {name!r} does not exist", param="model")


class ChatService:
    """Everything between the route and the core."""

    def __init__(
        self,
        frontend: Frontend,
        tokenizers: TokenizerRegistry,
        settings: HttpSettings,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._frontend = frontend
        self._tokenizers = tokenizers
        self._settings = settings
        self._clock = clock
        self._threads = WorkerThreads(threads=settings.tokenizer_threads, queue_max=settings.tokenizer_queue_max)
        self._bounds = CompletionBounds(settings.send_timeout_s, settings.cancel_timeout_s)
        self._running = 0

    @property
    def running(self) -> int:
        """Completions that have begun and not ended."""
        return self._running

    def close(self) -> None:
        """End the threads."""
        self._threads.close()

    async def complete(self, request: Request) -> Response:
        """Answer one request. Raises what the client is to be told."""
        if self._running >= self._settings.completions_max:
            raise Overloaded(f"this frontend already serves {self._running} chat completions")
        self._running += 1
        try:
            completion = await self._prepare(request)
        except BaseException:
            self._running -= 1
            raise
        describe = _describer(completion.request.request_id, self._settings.retry_after_s)
        return CompletionResponse(completion, self._frontend, self._bounds, describe=describe, on_end=self._count_end)

    def _count_end(self) -> None:
        self._running -= 1

    async def _prepare(self, request: Request) -> Completion:
        settings = self._settings
        body = await read_body(request, bytes_max=settings.body_bytes_max, timeout_s=settings.body_timeout_s)
        chat = parse_chat(body) if len(body) <= INLINE_BYTES_MAX else await self._threads.run(parse_chat, body)
        model = find_model(self._frontend, chat.model)
        tokenizer = await self._tokenizer(model)
        prompt = await self._prompt(chat, tokenizer)
        _check_vocabulary(prompt, model)
        sampling = to_sampling(
            chat,
            prompt_tokens=len(prompt),
            context_tokens_max=model.context_tokens_max,
            output_default=settings.output_tokens_default,
        )
        request_id = request.state.request_id
        return Completion(
            request=GenerateRequest(request_id, model.name, prompt, sampling, to_priority(chat)),
            output=OutputText(tokenizer.detokenizer(), sampling.stop),
            created=int(self._clock()),
            streams=bool(chat.stream),
            include_usage=bool(chat.stream_options and chat.stream_options.include_usage),
        )

    async def _tokenizer(self, model: ModelInfo) -> ChatTokenizer:
        try:
            cached = self._tokenizers.cached(model)
            return cached if cached is not None else await self._threads.run(self._tokenizers.get, model)
        except TokenizerError as error:
            # The reason names folders of this machine: it goes to the log, as the cause.
            raise InternalError(f"this frontend has no tokenizer for model {model.name!r}") from error

    async def _prompt(self, chat: ChatRequest, tokenizer: ChatTokenizer) -> list[int]:
        messages = _template_messages(chat, keep_developer=tokenizer.knows_developer)
        if sum(len(message["content"]) for message in messages) <= self._settings.inline_chars_max:
            return tokenizer.apply_chat_template(messages)
        return await self._threads.run(tokenizer.apply_chat_template, messages)


def _describer(request_id: str, retry_after_s: int) -> Callable[[BaseException], HttpError]:
    return lambda error: describe_error(error, request_id=request_id, retry_after_s=retry_after_s)


def _template_messages(chat: ChatRequest, *, keep_developer: bool) -> Sequence[Mapping[str, str]]:
    """What the chat template reads. `developer` is OpenAI's newer word for `system`, which few templates know."""
    messages: list[Mapping[str, str]] = []
    for message in chat.messages:
        role = "system" if message.role == "developer" and not keep_developer else message.role
        optional = {"name": message.name, "tool_call_id": message.tool_call_id}
        given = {key: value for key, value in optional.items() if value is not None}
        messages.append({"role": role, "content": message.text, **given})
    return messages


def _check_vocabulary(prompt: Sequence[int], model: ModelInfo) -> None:
    if not prompt:
        raise InvalidRequest("the messages have no tokens", param="messages")
    largest = max(prompt)
    if largest >= model.vocabulary_size:
        message = f"the messages contain token {largest}, but the model has {model.vocabulary_size}"
        raise InvalidRequest(message, param="messages")
