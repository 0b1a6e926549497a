"""What OpenAI's clients get from a server: `openai`, `litellm` and `langchain-openai` against a base URL.

Needs nothing of meshift, so it runs in an environment of its own, and against any server:

    python benchmarks/compatibility.py --url http://127.0.0.1:8000/v1 --model smollm2 --json FILE

A check passes if the client accepts the answer and the answer is what was asked for. A client whose package is missing
is reported as such.
"""

import argparse
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MESSAGES = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
COUNT = [{"role": "user", "content": "Count from one to ten in words, with commas."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "inhabitants": {"type": "integer"}},
    "required": ["city", "inhabitants"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
FORCE = {"type": "function", "function": {"name": "get_weather"}}
CHECKS = (
    "chat", "stream", "logprobs", "n", "stop", "seed", "tools", "json_schema", "usage", "errors", "completions",
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """Where to ask."""

    url: str
    model: str
    key: str


class OpenAIClient:
    """The `openai` package. The other two are adapted to its forms."""

    package = "openai"

    def __init__(self, target: Target) -> None:
        import openai

        self.target = target
        self.client = openai.OpenAI(base_url=target.url, api_key=target.key, max_retries=0, timeout=120)
        self.refusals: tuple[type[Exception], ...] = (openai.BadRequestError,)

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


class LiteLLM(OpenAIClient):
    """`litellm`, which gives objects like OpenAI's."""

    package = "litellm"

    def __init__(self, target: Target) -> None:
        import litellm

        litellm.telemetry = False
        self.target = target
        self.litellm = litellm
        self.refusals = (litellm.exceptions.BadRequestError,)

    def options(self) -> dict[str, Any]:
        return {
            "model": f"openai/{self.target.model}",
            "api_base": self.target.url,
            "api_key": self.target.key,
            "num_retries": 0,
            "timeout": 120,
        }

    def chat(self, **options: Any) -> Any:
        options = {"messages": MESSAGES, "temperature": 0, "max_tokens": 24, **options}
        return self.litellm.completion(**self.options(), **options)

    def check_completions(self) -> None:
        named = {**self.options(), "model": f"text-completion-openai/{self.target.model}"}
        answer = self.litellm.text_completion(**named, prompt="One, two,", max_tokens=4, temperature=0)
        assert answer.choices[0].text


class LangChain(OpenAIClient):
    """`langchain-openai`: its own forms."""

    package = "langchain_openai"

    def __init__(self, target: Target) -> None:
        super().__init__(target)

    def model(self, **options: Any) -> Any:
        from langchain_openai import ChatOpenAI

        target, options = self.target, {"temperature": 0, "max_tokens": 24, **options}
        return ChatOpenAI(base_url=target.url, api_key=target.key, model=target.model, max_retries=0, **options)

    def say(self, model: Any, messages: list[dict[str, str]] = MESSAGES) -> Any:
        return model.invoke(messages)

    def check_chat(self) -> None:
        assert self.say(self.model()).content.strip()

    def check_stream(self) -> None:
        pieces = [piece.content for piece in self.model().stream(MESSAGES)]
        assert sum(map(bool, pieces)) > 1, "it came in one piece"
        assert "".join(pieces) == self.say(self.model()).content

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


CLIENTS: tuple[type[OpenAIClient], ...] = (OpenAIClient, LiteLLM, LangChain)


def outcome(check: Callable[[], None]) -> dict[str, Any]:
    """Run one check."""
    begin = time.monotonic()
    try:
        check()
        passed, why = True, ""
    except Exception as error:  # whatever a client raises at an answer counts against the answer
        passed, why = False, f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return {"passed": passed, "why": why, "seconds": round(time.monotonic() - begin, 3)}


def run(target: Target, names: list[str]) -> dict[str, dict[str, Any]]:
    """All checks with all clients that are installed."""
    results: dict[str, dict[str, Any]] = {}
    for kind in CLIENTS:
        if names and kind.package not in names:
            continue
        if importlib.util.find_spec(kind.package) is None:
            results[kind.package] = {"missing": True}
            continue
        client = kind(target)
        results[kind.package] = {name: outcome(getattr(client, f"check_{name}")) for name in CHECKS}
    return results


def main() -> int:
    """Returns the number of failed checks, at most 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", required=True, help="base URL, with /v1")
    parser.add_argument("--model", required=True)
    parser.add_argument("--key", default="none", help="API key")
    parser.add_argument("--client", action="append", default=[], help="only this package (repeatable)")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    results = run(Target(arguments.url, arguments.model, arguments.key), arguments.client)
    for client, checks in results.items():
        for name, result in checks.items():
            said = "missing" if name == "missing" else "ok" if result["passed"] else f"FAILED {result['why']}"
            print(f"{client:18} {name:12} {said}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"url": arguments.url, "results": results}, indent=1) + "\n")
    failed = [name for checks in results.values() for name, result in checks.items()
              if name != "missing" and not result["passed"]]  # fmt: skip
    return min(len(failed), 1)


if __name__ == "__main__":
    sys.exit(main())
