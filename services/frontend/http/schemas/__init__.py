"""What clients send and get: OpenAI's chat completions and completions, as far as they are served, with SGLang's extra
parameters.

A field is one of:

- served: it does what OpenAI or, for `top_k`, `min_p`, `repetition_penalty`, `min_tokens` and `ignore_eos`, SGLang say;
  `priority` is meshift's own;
- accepted and ignored, because the answer doesn't depend on it: `user`, `safety_identifier`, `prompt_cache_key`,
  `prompt_cache_retention`, `metadata` (tags of stored completions), and `strict` of schemas, which are always obeyed;
- known but not served: accepted with a value that asks for nothing (its default, null, an empty list), else refused;
- unknown: refused.
"""

from meshift.services.frontend.http.schemas.answers import (
    ChatCompletion,
    Health,
    ModelCard,
    ModelList,
    Readiness,
    TextCompletion,
    Usage,
)
from meshift.services.frontend.http.schemas.chat import ChatMessage, ChatRequest
from meshift.services.frontend.http.schemas.generation import Generation
from meshift.services.frontend.http.schemas.text import TextRequest

__all__ = [
    "ChatCompletion",
    "ChatMessage",
    "ChatRequest",
    "Generation",
    "Health",
    "ModelCard",
    "ModelList",
    "Readiness",
    "TextCompletion",
    "TextRequest",
    "Usage",
]
