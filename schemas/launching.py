"""Messages between the scheduler, which decides how many instances there are, and launchers, which start and stop them.

A launch names how many the launcher shall have, not one more: asked twice, by one scheduler or by two, it starts one.
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from meshift.schemas.base import Message, Part
from meshift.schemas.identity import Owner
from meshift.schemas.limits import LAUNCHED_MAX, REASON_CHARS_MAX

Seconds = Annotated[float, Field(ge=0.0, le=86_400.0, allow_inf_nan=False)]


class LaunchState(StrEnum):
    """Where a launched instance is, as its launcher sees the process."""

    STARTING = "starting"
    """Capacity to come."""
    READY = "ready"
    RELEASING = "releasing"
    """It gives its requests away, and is stopped then."""


class LaunchedInstance(Part):
    """One that a launcher runs."""

    instance_id: str
    state: LaunchState
    state_s: Seconds
    """How long it has been in that state."""


class LauncherReport(Message):
    """Launcher -> scheduler, every interval and at every change."""

    kind: Literal["launcher_report"] = "launcher_report"
    launcher_id: str
    incarnation: int
    sequence: int
    model: str
    """What its instances serve."""
    instances: tuple[LaunchedInstance, ...] = Field(max_length=LAUNCHED_MAX)
    instances_max: int
    launches: int
    """Asked for and begun, since its start."""
    failures: int
    """Of those: never ready by their deadline, or dead before."""
    backoff_s: Seconds = 0.0
    """After failures, nothing is launched for so long."""
    last_failure: Annotated[str, Field(max_length=REASON_CHARS_MAX)] = ""
    start_s: Seconds = 0.0
    """How long the last start took; 0: none was seen."""


class LaunchRequest(Message):
    """Scheduler -> launcher: have so many instances, those that are starting included."""

    kind: Literal["launch_request"] = "launch_request"
    scheduler_id: str
    incarnation: int
    """The scheduler's; launchers obey the newest."""
    instances: int = Field(ge=1, le=LAUNCHED_MAX)
    timeout_s: float = Field(gt=0.0, le=86_400.0, allow_inf_nan=False)
    """A start that takes longer has failed."""


class ReleaseRequest(Message):
    """Scheduler -> launcher: this one gives its requests away, and is stopped."""

    kind: Literal["release_request"] = "release_request"
    scheduler_id: str
    incarnation: int
    owner: Owner
    deadline_s: Seconds
    """Then it goes whatever is left; that goes on elsewhere."""


class LaunchReply(Message):
    """Launcher -> scheduler."""

    kind: Literal["launch_reply"] = "launch_reply"
    instance_id: str
    """The one that is being started or released; empty if there are as many already. One that is being started may be
    called otherwise in later reports, where names can't be chosen."""
    report: LauncherReport
