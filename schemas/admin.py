"""What the admin routes of a frontend say and take."""

from typing import Literal

from pydantic import Field

from meshift.schemas.base import Part
from meshift.schemas.identity import Owner
from meshift.schemas.instances import LoadReport
from meshift.schemas.requests import Priority


class OpenRequest(Part):
    """A request that hasn't ended, as its frontend sees it."""

    request_id: str
    model: str
    state: Literal["submitting", "running"]
    """Submitting: no owner has it now; it is new, or lost its owner."""
    attempt: int
    hop: int
    owner: Owner | None
    prompt_tokens: int
    output_tokens: int
    """So far."""
    priority: Priority


class InstanceList(Part):
    """The newest reports of the live instances."""

    object: Literal["list"] = "list"
    data: tuple[LoadReport, ...]


class RequestList(Part):
    """This frontend's open requests, oldest first."""

    object: Literal["list"] = "list"
    data: tuple[OpenRequest, ...]


class DrainBody(Part):
    """How to drain an instance."""

    deadline_s: float = Field(default=30.0, ge=0.0, le=86_400.0, allow_inf_nan=False)
    """Then it leaves, whatever still runs; that goes on elsewhere."""
