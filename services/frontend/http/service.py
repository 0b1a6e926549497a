"""From a request's body to requests for the core."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from meshift.schemas.errors import InternalError, InvalidRequest, NotFound, Overloaded, Unavailable
from meshift.schemas.instances import ModelInfo
from meshift.schemas.limits import REQUEST_ID_CHARS_MAX
from meshift.schemas.requests import Sampling
from meshift.services.frontend.api import Frontend, GenerateRequest
from meshift.services.frontend.http.body import INLINE_BYTES_MAX, parse_body, read_body
from meshift.services.frontend.http.chat import ChatPlan, plan_chat
from meshift.services.frontend.http.choice import Choice
from meshift.services.frontend.http.completion import Completion, CompletionBounds, CompletionResponse
from meshift.services.frontend.http.errors import HttpError, describe_error
from meshift.services.frontend.http.forms import AnswerForm, ChatForm, Head, TextForm
from meshift.services.frontend.http.sampling import TEXT_OUTPUT_DEFAULT, Room, of_choice, to_priority, to_sampling
from meshift.services.frontend.http.schemas import ChatRequest, Generation, TextRequest
from meshift.services.frontend.http.schemas.generation import CHOICES_MAX
from meshift.services.frontend.http.settings import HttpSettings
from meshift.services.frontend.http.workers import WorkerThreads
from meshift.services.frontend.text.output import OutputText
from meshift.services.frontend.text.registry import TokenizerRegistry
from meshift.services.frontend.text.tokenizer import ChatTokenizer, TokenizerError
from meshift.services.frontend.text.tools import ToolText
from meshift.tracing.names import OPERATION_CHAT, OPERATION_COMPLETION

BodyT = TypeVar("BodyT", bound=BaseModel)

Prepare = Callable[[Request], Awaitable[Completion]]


def find_model(frontend: Frontend, name: str) -> ModelInfo:
    """Raises `NotFound`, or `Unavailable` if no model at all is served yet."""
    models = frontend.models()
    if not models:
        raise Unavailable("no instance serves a model now")
    for model in models:
        if model.name == name:
            return model
    raise NotFound(f"the model {name!r} does not exist", param="model")


class CompletionService:
    """Everything between the routes and the core."""

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

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`. Raises what the client is to be told."""
        return await self._answer(request, self._prepare_chat)

    async def text(self, request: Request) -> Response:
        """`POST /v1/completions`. Raises what the client is to be told."""
        return await self._answer(request, self._prepare_text)

    async def _answer(self, request: Request, prepare: Prepare) -> Response:
        if self._running >= self._settings.completions_max:
            raise Overloaded(f"this frontend already serves {self._running} completions")
        self._running += 1
        try:
            completion = await prepare(request)
        except BaseException:
            self._running -= 1
            raise
        describe = _describer(completion.head.id, self._settings.retry_after_s)
        return CompletionResponse(completion, self._frontend, self._bounds, describe=describe, on_end=self._count_end)

    def _count_end(self) -> None:
        self._running -= 1

    async def _prepare_chat(self, request: Request) -> Completion:
        chat = await self._read(request, ChatRequest)
        model, tokenizer = await self._model(chat.model)
        plan = plan_chat(chat, tokenizer, self._settings.tool_parser)
        if plan.chars <= self._settings.inline_chars_max:
            prompt = tokenizer.apply_chat_template(plan.messages, plan.tools)
        else:
            prompt = await self._threads.run(tokenizer.apply_chat_template, plan.messages, plan.tools)
        sampling = to_sampling(
            chat,
            _room("messages", prompt, model),
            output_default=self._settings.output_tokens_default,
            logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
            json_schema=plan.json_schema,
        )
        head = self._head(request, model)
        form = ChatForm(head.id, tokenizer.token_bytes, scores=bool(chat.logprobs))
        return _completion(chat, head, form, tokenizer, [(prompt, sampling)], plan)

    async def _prepare_text(self, request: Request) -> Completion:
        text = await self._read(request, TextRequest)
        if len(text.prompt) * text.choices_per_prompt > CHOICES_MAX:
            raise InvalidRequest(f"n: prompts times n may be at most {CHOICES_MAX}", param="n")
        model, tokenizer = await self._model(text.model)
        pairs = []
        for prompt in await self._encode(text, tokenizer):
            room = _room("prompt", prompt, model)
            sampling = to_sampling(text, room, output_default=TEXT_OUTPUT_DEFAULT, logprobs=text.logprobs)
            pairs.append((prompt, sampling))
        form = TextForm(tokenizer.token_bytes, scores=text.logprobs is not None)
        return _completion(text, self._head(request, model), form, tokenizer, pairs)

    async def _read(self, request: Request, kind: type[BodyT]) -> BodyT:
        settings = self._settings
        body = await read_body(request, bytes_max=settings.body_bytes_max, timeout_s=settings.body_timeout_s)
        if len(body) <= INLINE_BYTES_MAX:
            return parse_body(kind, body)
        return await self._threads.run(parse_body, kind, body)

    async def _model(self, name: str) -> tuple[ModelInfo, ChatTokenizer]:
        model = find_model(self._frontend, name)
        try:
            cached = self._tokenizers.cached(model)
            return model, cached if cached is not None else await self._threads.run(self._tokenizers.get, model)
        except TokenizerError as error:
            # The reason names folders of this machine: it goes to the log, as the cause.
            raise InternalError(f"this frontend has no tokenizer for model {model.name!r}") from error

    async def _encode(self, text: TextRequest, tokenizer: ChatTokenizer) -> list[list[int]]:
        def encode() -> list[list[int]]:
            return [
                tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
                for prompt in text.prompt
            ]

        chars = sum(len(prompt) for prompt in text.prompt if isinstance(prompt, str))
        return encode() if chars <= self._settings.inline_chars_max else await self._threads.run(encode)

    def _head(self, request: Request, model: ModelInfo) -> Head:
        return Head(request.state.request_id, int(self._clock()), model.name)


def _completion(
    body: Generation,
    head: Head,
    form: AnswerForm,
    tokenizer: ChatTokenizer,
    prompts: Sequence[tuple[Sequence[int], Sampling]],
    plan: ChatPlan | None = None,
) -> Completion:
    count = body.choices_per_prompt
    operation = OPERATION_COMPLETION if isinstance(body, TextRequest) else OPERATION_CHAT
    choices = []
    for index in range(len(prompts) * count):
        prompt, sampling = prompts[index // count]
        sampling = of_choice(sampling, index % count)
        request_id = head.id if len(prompts) * count == 1 else f"{head.id}-{index}"
        assert len(request_id) <= REQUEST_ID_CHARS_MAX, request_id
        detokenizer = tokenizer.detokenizer(plan.shown if plan else frozenset())
        choices.append(
            Choice(
                index=index,
                request=GenerateRequest(request_id, head.model, prompt, sampling, to_priority(body), operation),
                output=OutputText(detokenizer, sampling.stop, scores=sampling.logprobs is not None),
                tools=_tool_text(plan),
            )
        )
    return Completion(
        head=head,
        form=form,
        choices=choices,
        choices_per_prompt=count,
        streams=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )


def _tool_text(plan: ChatPlan | None) -> ToolText | None:
    if plan is None or plan.form is None:
        return None
    return ToolText(plan.form, plan.names, calls_max=plan.calls_max)


def _describer(request_id: str, retry_after_s: int) -> Callable[[BaseException], HttpError]:
    return lambda error: describe_error(error, request_id=request_id, retry_after_s=retry_after_s)


def _room(param: str, prompt: Sequence[int], model: ModelInfo) -> Room:
    """Raises `InvalidRequest` for a prompt that the model can't read."""
    if not prompt:
        raise InvalidRequest(f"{param} has no tokens", param=param)
    largest = max(prompt)
    if largest >= model.vocabulary_size:
        message = f"{param} has token {largest}, but the model has {model.vocabulary_size}"
        raise InvalidRequest(message, param=param)
    return Room(param, len(prompt), model.context_tokens_max, model.vocabulary_size)
