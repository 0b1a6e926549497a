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
    """Frontend -> worker: what is there, or a new capacity."""

    kind: Literal["memory_request"] = "memory_request"
    resize: MemoryBody | None = None
    """None: nothing changes."""


class MemoryUnits(Part):
    """KV in units, each with one page of tokens of a group of stacked layers. Counts and bytes are of all ranks unless
    said."""

    layers_per_group: int
    """k."""
    groups: int
    last_group_layers: int
    page_tokens: int
    """T: tokens that a unit, and so a page, holds."""
    unit_bytes: int
    """Of one unit."""
    unit_waste_bytes: int
    """Of one unit of a whole group, that no token can use."""
    last_unit_waste_bytes: int
    """As `unit_waste_bytes`, of the last group."""
    units: int
    """For which there are addresses."""
    committed: int
    """Of these, that are backed now: one for each page, group and tensor rank, and one page more, where the engine's
    padding goes."""
    committed_bytes: int
    waste_bytes: int
    """Of the committed units, that no token can use."""


class MemoryReply(Message):
    """What there is, and, after a resize, what was done, as near to what was asked for as could be."""

    kind: Literal["memory_reply"] = "memory_reply"
    owner: Owner
    capacity: int
    """Now: used + cached + free + reserved."""
    used: int
    cached: int
    """Of prefixes that nobody uses; they go when room is needed."""
    free: int
    reserved: int
    """Promised to requests that move here."""
    pages: int
    """Of the capacity."""
    page_tokens: int
    request_tokens_max: int
    """Prompt plus output of one request, from now on."""
    resident_bytes: int | None
    """Held by all ranks, as the system counts; None: the engine doesn't know."""
    units: MemoryUnits | None = None
    """None: one slab, shared out token by token, none of which goes back to the system."""
    evicted: int = 0
    """Of cached prefixes that went."""
    preempted: int = 0
    """Requests that lost their memory."""
    released_bytes: int = 0
    """Given back to the system, by all ranks."""
    reason: str = ""
    """Why it isn't the capacity that was asked for; empty if it is."""
