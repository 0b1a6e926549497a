"""With `litellm`, which gives objects like OpenAI's."""

import os
from typing import Any

from meshift.benchmarks.compatibility.openai_checks import OpenAIClient
from meshift.benchmarks.compatibility.questions import MESSAGES, PARTS, Target


class LiteLLM(OpenAIClient):
    """`litellm`, which gives objects like OpenAI's."""

    package = "litellm"

    def __init__(self, target: Target) -> None:
        # Else it asks the network for a list of prices.
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        import litellm

        litellm.telemetry = False
        litellm.suppress_debug_info = True
        self.target = target
        self.litellm = litellm
        self.refusals = (litellm.exceptions.BadRequestError,)
        self.not_found = (litellm.exceptions.NotFoundError,)

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

    async def chat_async(self, **options: Any) -> Any:
        options = {"messages": MESSAGES, "temperature": 0, "max_tokens": 24, **options}
        return await self.litellm.acompletion(**self.options(), **options)

    def check_parts(self) -> None:
        options = {"messages": PARTS, "temperature": 0, "max_completion_tokens": 5}
        answer = self.litellm.completion(**self.options(), **options)
        assert answer.choices[0].message.content.strip()
        assert answer.usage.completion_tokens <= 5

    def check_completions(self) -> None:
        named = {**self.options(), "model": f"text-completion-openai/{self.target.model}"}
        answer = self.litellm.text_completion(**named, prompt="One, two,", max_tokens=4, temperature=0)
        assert answer.choices[0].text
