"""What is asked of a server, and where."""

from dataclasses import dataclass
from typing import Any

Messages = list[dict[str, Any]]

MESSAGES: Messages = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
COUNT: Messages = [{"role": "user", "content": "Count from one to ten in words, with commas."}]
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
CALLED: Messages = [
    {"role": "user", "content": "What is the weather in Paris?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "Sunny, 21 degrees."},
]
PARTS: Messages = [
    {"role": "developer", "content": "You answer briefly."},
    {"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]},
]
LONG: Messages = [{"role": "user", "content": "one two three " * 20_000}]
CHECKS = {
    "chat": "a whole answer",
    "stream": "a streamed answer: the same text, in pieces, with its finish reason and usage",
    "async": "the same with the asynchronous client, several at once",
    "parts": "messages of role `developer`, content in parts, `max_completion_tokens`",
    "logprobs": "`logprobs`, `top_logprobs`: natural logarithms, `bytes` that add up to the text",
    "n": "`n` answers that differ",
    "stop": "`stop`: the text up to it, streamed or not",
    "seed": "`seed`: one seed, one answer",
    "tools": "a named `tool_choice`: a call with arguments that obey",
    "tools_stream": "the same, streamed",
    "tools_auto": "`tools` with `tool_choice` `auto`",
    "tool_answer": "a conversation with a call and its result in it",
    "json_schema": "`response_format` `json_schema`: an answer that obeys",
    "json_object": "`response_format` `json_object`",
    "logit_bias": "`logit_bias`: 100 makes a token certain",
    "usage": "`usage` that counts right",
    "errors": "a wrong value and an unknown field are refused, by name",
    "wrong_model": "a model that isn't there: 404",
    "too_long": "a prompt longer than the context: 400",
    "models": "the list of models",
    "completions": "`/v1/completions` (two prompts and `logprobs` with `openai`)",
}
"""Names, and what each asks."""
NOT_THERE = ("models",)
"""What only the `openai` package has a call for; the others are built upon it or ask nobody."""


@dataclass(frozen=True)
class Target:
    """Where to ask."""

    url: str
    model: str
    key: str
