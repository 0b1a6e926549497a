"""With the `openai` package."""

import asyncio
import json
import math
from dataclasses import replace
from typing import Any

from meshift.benchmarks.compatibility.questions import CALLED, COUNT, FORCE, FORMAT, LONG, MESSAGES, PARTS, TOOL, Target


class OpenAIClient:
    """The `openai` package. The other two are adapted to its forms."""

    package = "openai"

    def __init__(self, target: Target) -> None:
        import openai

        self.target = target
        self.client = openai.OpenAI(base_url=target.url, api_key=target.key, max_retries=0, timeout=120)
        self.asynchronous = openai.AsyncOpenAI(base_url=target.url, api_key=target.key, max_retries=0, timeout=120)
        self.refusals: tuple[type[Exception], ...] = (openai.BadRequestError,)
        self.not_found: tuple[type[Exception], ...] = (openai.NotFoundError,)

    def chat(self, **options: Any) -> Any:
        """A whole answer, in the form of `openai.types.chat.ChatCompletion`."""
        options = {"messages": MESSAGES, "temperature": 0, "max_tokens": 24, **options}
        return self.client.chat.completions.create(model=self.target.model, **options)

    def check_chat(self) -> None:
        answer = self.chat()
        assert answer.choices[0].message.content.strip()
        assert answer.choices[0].finish_reason in ("stop", "length")

    def check_stream(self) -> None:
        whole = self.chat().choices[0].message.content
        events = list(self.chat(stream=True, stream_options={"include_usage": True}))
        pieces = [choice.delta.content or "" for event in events for choice in event.choices]
        assert sum(map(bool, pieces)) > 1, "it came in one piece"
        assert "".join(pieces) == whole, f"{''.join(pieces)!r} is not {whole!r}"
        assert any(choice.finish_reason for event in events for choice in event.choices)
        assert any(getattr(event, "usage", None) for event in events), "no usage"

    async def chat_async(self, **options: Any) -> Any:
        """As `chat`."""
        options = {"messages": MESSAGES, "temperature": 0, "max_tokens": 24, **options}
        return await self.asynchronous.chat.completions.create(model=self.target.model, **options)

    async def text_async(self) -> str:
        """A streamed answer."""
        events = [event async for event in await self.chat_async(stream=True)]
        return "".join(choice.delta.content or "" for event in events for choice in event.choices)

    def check_async(self) -> None:
        async def several() -> list[str]:
            return await asyncio.gather(*(self.text_async() for _ in range(4)))

        whole = self.chat().choices[0].message.content
        assert asyncio.run(several()) == [whole] * 4

    def check_parts(self) -> None:
        options = {"messages": PARTS, "temperature": 0, "max_completion_tokens": 5}
        answer: Any = self.client.chat.completions.create(model=self.target.model, **options)  # type: ignore[call-overload]
        assert answer.choices[0].message.content.strip()
        assert answer.usage.completion_tokens <= 5

    def check_logprobs(self) -> None:
        choice = self.chat(logprobs=True, top_logprobs=3).choices[0]
        content = choice.logprobs.content
        for item in content:
            assert math.isfinite(item.logprob)
            assert item.logprob <= 0
            assert len(item.top_logprobs) == 3
            assert item.top_logprobs[0].logprob >= item.logprob - 1e-4, "temperature 0 takes the likeliest token"
        raw = b"".join(bytes(item.bytes) for item in content)
        assert choice.message.content.encode() in raw, f"{raw!r} is not the text"

    def check_n(self) -> None:
        choices = self.chat(n=3, temperature=1, seed=3, messages=COUNT).choices
        assert [choice.index for choice in choices] == [0, 1, 2]
        assert len({choice.message.content for choice in choices}) > 1, "all are alike"

    def check_stop(self) -> None:
        text = self.chat().choices[0].message.content
        stop = text[len(text) // 2 : len(text) // 2 + 4]
        for options in ({}, {"stream": True}):
            answer = self.chat(stop=[stop], **options)
            if options:
                found = "".join(choice.delta.content or "" for event in answer for choice in event.choices)
            else:
                found = answer.choices[0].message.content
                assert answer.choices[0].finish_reason == "stop"
            assert found == text.partition(stop)[0], f"{found!r}, stopped at {stop!r}"

    def check_seed(self) -> None:
        options = {"temperature": 1, "messages": COUNT}
        texts = [self.chat(seed=seed, **options).choices[0].message.content for seed in (5, 5, 6)]
        assert texts[0] == texts[1], "one seed gives two answers"
        assert texts[0] != texts[2], "two seeds give one answer"

    def check_tools(self) -> None:
        choice = self.chat(tools=[TOOL], tool_choice=FORCE, max_tokens=64).choices[0]
        (call,) = choice.message.tool_calls
        assert call.function.name == "get_weather"
        assert isinstance(json.loads(call.function.arguments)["city"], str)

    def check_tools_stream(self) -> None:
        events = self.chat(tools=[TOOL], tool_choice=FORCE, max_tokens=64, stream=True)
        deltas = [choice.delta for event in events for choice in event.choices]
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        assert {call.index for call in calls} == {0}
        assert "".join(call.function.name or "" for call in calls) == "get_weather"
        arguments = "".join(call.function.arguments or "" for call in calls)
        assert isinstance(json.loads(arguments)["city"], str)

    def check_tools_auto(self) -> None:
        message = self.chat(tools=[TOOL], tool_choice="auto", max_tokens=32).choices[0].message
        assert message.content or message.tool_calls

    def check_tool_answer(self) -> None:
        assert self.chat(messages=CALLED).choices[0].message.content.strip()

    def check_json_object(self) -> None:
        messages = [{"role": "user", "content": "A JSON object with the key city, and nothing else."}]
        choice = self.chat(messages=messages, response_format={"type": "json_object"}, max_tokens=200).choices[0]
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
        assert choice.message.content.lstrip().startswith("{")

    def check_logit_bias(self) -> None:
        # Nothing is known of the vocabulary, but that it has a token 72, and that the answer is not this one alone.
        text = self.chat(max_tokens=4, logit_bias={"72": 100}).choices[0].message.content
        assert text
        assert text == text[: len(text) // 4] * 4, f"{text!r} is not one token four times"

    def check_wrong_model(self) -> None:
        target, self.target = self.target, replace(self.target, model="no-such-model")
        try:
            self.chat()
        except self.not_found:
            return
        finally:
            self.target = target
        raise AssertionError("it was answered by another model")

    def check_too_long(self) -> None:
        try:
            self.chat(messages=LONG)
        except self.refusals:
            return
        raise AssertionError("it was answered")

    def check_models(self) -> None:
        assert self.target.model in [model.id for model in self.client.models.list()]

    def check_json_schema(self) -> None:
        text = self.chat(response_format=FORMAT, max_tokens=64).choices[0].message.content
        value = json.loads(text)
        assert set(value) == {"city", "inhabitants"}
        assert isinstance(value["inhabitants"], int)

    def check_usage(self) -> None:
        usage = self.chat(max_tokens=5).usage
        assert usage.completion_tokens == 5
        assert usage.prompt_tokens > 5
        assert usage.total_tokens == usage.prompt_tokens + 5

    def check_errors(self) -> None:
        """A wrong value, and a field that no server knows, name themselves."""
        self.refused("temperature", temperature=77)
        self.refused("made_up_field", extra_body={"made_up_field": 1})

    def refused(self, field: str, **options: Any) -> None:
        said = ""
        try:
            self.chat(**options)
        except self.refusals as error:
            said = str(error)
        assert said, f"{field} was accepted"
        assert field in said, f"{field} isn't named: {said}"

    def check_completions(self) -> None:
        answer: Any = self.client.completions.create(
            model=self.target.model, prompt=["One, two,", "A, b,"], max_tokens=4, temperature=0, logprobs=1
        )
        assert len(answer.choices) == 2
        assert all(choice.text and choice.logprobs.token_logprobs for choice in answer.choices)
