"""Bounds of the HTTP shell."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

ToolParserName = Literal["auto", "none", "hermes", "llama3", "mistral"]


class HttpSettings(BaseModel):
    """What an operator may set."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    body_bytes_max: int = Field(default=4 * 1024 * 1024, ge=1)
    """Larger bodies get 413."""
    discard_bytes_max: int = Field(default=64 * 1024 * 1024, ge=0)
    """What is still read, and thrown away, of such a body, so that its client comes to read the answer."""
    body_timeout_s: float = Field(default=30.0, gt=0.0)
    """A body that isn't complete by then gets 408."""
    completions_max: int = Field(default=4096, ge=1)
    """Completions at once; further ones get 429."""
    output_tokens_default: int = Field(default=4096, ge=1)
    """Output limit of chats that name none, if the context has that much left."""
    inline_chars_max: int = Field(default=4096, ge=0)
    """Prompts up to this length are tokenised on the event loop (about 1 ms), longer ones in a thread."""
    tool_parser: ToolParserName = "auto"
    """How the model writes tool calls; `auto` goes by its chat template, `none` refuses tools."""
    tokenizer_threads: int = Field(default=2, ge=1)
    tokenizer_queue_max: int = Field(default=256, ge=1)
    """Bodies and prompts that a thread works on or will; further ones get 429."""
    send_timeout_s: float = Field(default=60.0, gt=0.0)
    """A client that takes no byte for that long counts as gone."""
    cancel_timeout_s: float = Field(default=5.0, gt=0.0)
    """How long the cancelling of a request may hold its connection's task."""
    retry_after_s: int = Field(default=1, ge=0)
    """`Retry-After` of 429 and 503."""
