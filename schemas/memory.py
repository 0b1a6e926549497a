"""Messages about an instance's KV memory: how much there is, and a new capacity while it serves. Tokens unless said."""

from typing import Literal

from pydantic import Field

from meshift.schemas.base import Message, Part
from meshift.schemas.identity import Owner

CAPACITY_TOKENS_MAX = 1 << 40


class MemoryBody(Part):
    """What an operator asks for."""

    capacity: int = Field(ge=1, le=CAPACITY_TOKENS_MAX)
    """Whole pages of it."""
    preempt: bool = False
    """Whether running requests may lose their memory for it, and wait again. Cached prefixes go in any case."""


class MemoryRequest(Message):
    """Frontend -> worker: a new capacity."""

    kind: Literal["memory_request"] = "memory_request"
    resize: MemoryBody


class MemoryReply(Message):
    """What was done, as near to what was asked for as could be."""

    kind: Literal["memory_reply"] = "memory_reply"
    owner: Owner
    capacity: int
    """Now."""
    request_tokens_max: int
    """Prompt plus output of one request, from now on."""
    evicted: int
    """Of cached prefixes that went."""
    preempted: int
    """Requests that lost their memory."""
    released_bytes: int
    """Given back to the system, by all ranks."""
    resident_bytes: int
    """Held by all ranks, as the system counts."""
    reason: str = ""
    """Why it isn't the capacity that was asked for; empty if it is."""
