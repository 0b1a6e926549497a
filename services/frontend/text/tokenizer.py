"""A model folder's tokeniser and chat template, without torch.

`tokenizer.json` is read as it is: the fast tokeniser class is imported from its own module because `transformers`
itself loads torch where that is installed.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

from meshift.schemas.errors import InternalError, InvalidRequest
from meshift.services.frontend.text.detokenizer import (
    Detokenizer,
    UnsupportedDecoder,
    detokenizer_factory,
    token_reader,
)

logger = logging.getLogger(__name__)

ChatMessage = Mapping[str, Any]
"""`role` and `content`, and what else the template reads: `name`, `tool_call_id`, `tool_calls`."""

ToolDefinition = Mapping[str, Any]
"""OpenAI's form of a tool, which is what templates read."""


class TokenizerError(InternalError):
    """A model folder's tokeniser can't be used; the message says why."""


class ChatTokenizer:
    """Encodes and decodes for one model. Safe to use from several threads."""

    def __init__(self, fast: PreTrainedTokenizerFast, eos_ids: frozenset[int]) -> None:
        """Raises `UnsupportedDecoder`."""
        self._fast = fast
        self._tokenizer = fast.backend_tokenizer
        # Set once: setting them for each call, as `fast(...)` does, fails when threads overlap.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._make_detokenizer = {frozenset[str](): detokenizer_factory(self._tokenizer)}
        self._read_token = token_reader(self._tokenizer)
        self._template = _template_of(fast)
        self.eos_ids = eos_ids
        """Tokens that end an output."""

    @classmethod
    def load(cls, folder: Path) -> "ChatTokenizer":
        """Read `tokenizer.json`, the chat template and the end-of-sequence ids. Blocks, up to seconds for a large
        vocabulary. Raises `TokenizerError`."""
        if not folder.is_dir():
            raise TokenizerError(f"{folder} is no folder: this service must see the model's tokenizer files")
        if not (folder / "tokenizer.json").is_file():
            raise TokenizerError(f"{folder} has no tokenizer.json; save the model's fast tokenizer there")
        try:
            fast = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
            return cls(fast, _eos_ids(folder, fast))
        except UnsupportedDecoder as error:
            raise TokenizerError(f"the tokenizer in {folder} is not supported: {error}") from error
        except Exception as error:  # the library raises whatever it meets in the files
            raise TokenizerError(f"the tokenizer in {folder} can't be read: {error}") from error

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def knows_developer(self) -> bool:
        """Whether the template has something to say on the role `developer`."""
        return self._template is not None and "developer" in self._template

    @property
    def template(self) -> str:
        """The chat template; empty if there is none."""
        return self._template or ""

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[ToolDefinition] = ()) -> str:
        """The prompt that asks for the assistant's next message. Raises `InvalidRequest` if there is no template or it
        refuses these messages."""
        if self._template is None:
            raise InvalidRequest("this model has no chat template", param="messages")
        chat = [dict(message) for message in messages]
        try:
            given: list[dict[Any, Any] | Callable[..., Any]] | None = [dict(tool) for tool in tools] or None
            return str(self._fast.apply_chat_template(chat, tools=given, tokenize=False, add_generation_prompt=True))
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}", param="messages") from error
        except Exception as error:  # a template is a program; what it trips over is in the messages
            logger.warning("the chat template failed", exc_info=True)
            message = "the chat template can't render these messages"
            raise InvalidRequest(message, param="messages") from error

    def apply_chat_template(self, messages: Sequence[ChatMessage], tools: Sequence[ToolDefinition] = ()) -> list[int]:
        """The prompt of a chat in tokens. As in all servers of this kind, a special token that a message spells out is
        that token. Raises `InvalidRequest`."""
        # The template writes the beginning-of-sequence token itself.
        return self.encode(self.render(messages, tools))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Text to tokens."""
        # The batch call releases the interpreter lock while it works; `encode` would hold it.
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Tokens to text, special tokens left out."""
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for; special tokens as they are written."""
        return self._read_token(token)

    def detokenizer(self, shown: frozenset[str] = frozenset()) -> Detokenizer:
        """A new one, for one output. Special tokens have no text, except those in `shown`."""
        if shown not in self._make_detokenizer:
            self._make_detokenizer[shown] = detokenizer_factory(self._tokenizer, shown)
        return self._make_detokenizer[shown]()


def _template_of(fast: PreTrainedTokenizerFast) -> str | None:
    return str(fast.get_chat_template()) if fast.chat_template else None


def _eos_ids(folder: Path, fast: PreTrainedTokenizerFast) -> frozenset[int]:
    ids: set[int] = set()
    if isinstance(fast.eos_token_id, int):
        ids.add(fast.eos_token_id)
    for name in ("generation_config.json", "config.json"):
        ids.update(_configured_eos_ids(folder / name))
    return frozenset(ids)


def _configured_eos_ids(path: Path) -> list[int]:
    if not path.is_file():
        return []
    value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int)]
