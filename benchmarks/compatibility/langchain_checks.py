"""With `langchain-openai`, which has forms of its own."""

import asyncio
import json
from typing import Any

from meshift.benchmarks.compatibility.openai_checks import OpenAIClient
from meshift.benchmarks.compatibility.questions import (
    CALLED,
    COUNT,
    LONG,
    MESSAGES,
    PARTS,
    SCHEMA,
    TOOL,
    Messages,
    Target,
)


class LangChain(OpenAIClient):
    """`langchain-openai`: its own forms."""

    package = "langchain_openai"

    def __init__(self, target: Target) -> None:
        super().__init__(target)

    def model(self, **options: Any) -> Any:
        from langchain_openai import ChatOpenAI

        target, options = self.target, {"temperature": 0, "max_tokens": 24, **options}
        return ChatOpenAI(base_url=target.url, api_key=target.key, model=target.model, max_retries=0, **options)

    def say(self, model: Any, messages: Messages = MESSAGES) -> Any:
        return model.invoke(messages)

    def chat(self, **options: Any) -> Any:
        """For the checks of OpenAI's package that need no more than an answer or a refusal."""
        return self.say(self.model(**options))

    def check_chat(self) -> None:
        assert self.say(self.model()).content.strip()

    def check_stream(self) -> None:
        pieces = [piece.content for piece in self.model().stream(MESSAGES)]
        assert sum(map(bool, pieces)) > 1, "it came in one piece"
        assert "".join(pieces) == self.say(self.model()).content

    async def text_async(self) -> str:
        return "".join([str(piece.content) async for piece in self.model().astream(MESSAGES)])

    def check_async(self) -> None:
        async def several() -> list[str]:
            return await asyncio.gather(*(self.text_async() for _ in range(4)))

        assert asyncio.run(several()) == [self.say(self.model()).content] * 4

    def check_parts(self) -> None:
        answer = self.say(self.model(max_tokens=None, max_completion_tokens=5), PARTS)
        assert answer.content.strip()
        assert answer.usage_metadata["output_tokens"] <= 5

    def check_logprobs(self) -> None:
        content = self.say(self.model(logprobs=True, top_logprobs=3)).response_metadata["logprobs"]["content"]
        assert content
        assert all(item["logprob"] <= 0 and len(item["top_logprobs"]) == 3 for item in content)

    def check_n(self) -> None:
        from langchain_core.messages import HumanMessage

        messages = [HumanMessage(COUNT[0]["content"])]
        (answers,) = self.model(n=3, temperature=1, seed=3).generate([messages]).generations
        assert len({answer.text for answer in answers}) > 1
        assert len(answers) == 3

    def check_stop(self) -> None:
        text = self.say(self.model()).content
        stop = text[len(text) // 2 : len(text) // 2 + 4]
        assert self.model().invoke(MESSAGES, stop=[stop]).content == text.partition(stop)[0]

    def check_seed(self) -> None:
        texts = [self.say(self.model(seed=seed, temperature=1), COUNT).content for seed in (5, 5, 6)]
        assert texts[0] == texts[1], "one seed gives two answers"
        assert texts[0] != texts[2], "two seeds give one answer"

    def check_tools(self) -> None:
        bound = self.model(max_tokens=64).bind_tools([TOOL], tool_choice="get_weather")
        (call,) = bound.invoke(MESSAGES).tool_calls
        assert call["name"] == "get_weather"
        assert isinstance(call["args"]["city"], str)

    def check_tools_stream(self) -> None:
        bound = self.model(max_tokens=64).bind_tools([TOOL], tool_choice="get_weather")
        whole, *rest = list(bound.stream(MESSAGES))
        for piece in rest:
            whole += piece
        (call,) = whole.tool_calls
        assert call["name"] == "get_weather"
        assert isinstance(call["args"]["city"], str)

    def check_tools_auto(self) -> None:
        answer = self.model(max_tokens=32).bind_tools([TOOL]).invoke(MESSAGES)
        assert answer.content or answer.tool_calls

    def check_tool_answer(self) -> None:
        assert self.say(self.model(), CALLED).content.strip()

    def check_json_object(self) -> None:
        messages = [{"role": "user", "content": "A JSON object with the key city, and nothing else."}]
        answer = self.say(self.model(max_tokens=200).bind(response_format={"type": "json_object"}), messages)
        if answer.response_metadata["finish_reason"] == "stop":
            assert isinstance(json.loads(answer.content), dict)
        assert answer.content.lstrip().startswith("{")

    def check_logit_bias(self) -> None:
        text = self.say(self.model(max_tokens=4, logit_bias={72: 100})).content
        assert text
        assert text == text[: len(text) // 4] * 4, f"{text!r} is not one token four times"

    def check_too_long(self) -> None:
        try:
            self.say(self.model(), LONG)
        except self.refusals:
            return
        raise AssertionError("it was answered")

    def check_json_schema(self) -> None:
        schema = {"title": "city", "description": "A city", **SCHEMA}
        model = self.model(max_tokens=64).with_structured_output(schema, method="json_schema")
        value = model.invoke(MESSAGES)
        assert set(value) == {"city", "inhabitants"}

    def check_usage(self) -> None:
        usage = self.say(self.model(max_tokens=5)).usage_metadata
        assert usage["output_tokens"] == 5
        assert usage["total_tokens"] == usage["input_tokens"] + 5

    def refused(self, field: str, **options: Any) -> None:
        said = ""
        try:
            self.say(self.model(**options))
        except self.refusals as error:
            said = str(error)
        assert said, f"{field} was accepted"
        assert field in said, f"{field} isn't named: {said}"

    def check_completions(self) -> None:
        from langchain_openai import OpenAI

        target = self.target
        model = OpenAI(base_url=target.url, api_key=target.key, model=target.model, max_tokens=4, temperature=0)
        assert model.invoke("One, two,")
