"""What a frontend answers, as far as this client reads it. Fields that it doesn't know are left out."""

from collections.abc import Sequence

from pydantic import BaseModel


class Model(BaseModel):
    """A model that is served."""

    id: str
    max_model_len: int | None = None
    """Context length in tokens."""


class ModelList(BaseModel):
    data: list[Model]


class Usage(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int


class Message(BaseModel):
    """What a model said, or a piece of it."""

    content: str | None = None


class Choice(BaseModel):
    """One answer, or a piece of it."""

    index: int = 0
    message: Message = Message()
    delta: Message = Message()
    finish_reason: str | None = None


class Chat(BaseModel):
    """An answer to a chat, or an event of a streamed one."""

    id: str = ""
    choices: Sequence[Choice] = ()
    usage: Usage | None = None

    @property
    def text(self) -> str:
        """The text of the first choice, or the piece of it."""
        parts = (choice.message.content or choice.delta.content for choice in self.choices if choice.index == 0)
        return "".join(part or "" for part in parts)
