"""How the steps of an instance grow with its load: what the scheduler takes of a calibration, to know what headroom
costs the others."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from meshift.services.calibration.reading import read_calibration
from meshift.services.scheduler.policy.settings import PolicySettings


class StepGrowth(BaseModel):
    """Settings of the section `headroom`, measured. In a file within the bounds of the settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    full_step_times: float = Field(gt=1, le=100)
    request_tokens: float = Field(ge=0)


class _File(BaseModel):
    """What of the file is read here."""

    model_config = ConfigDict(extra="ignore")

    version: Literal[1]
    step_growth: StepGrowth | None = None


def load_growth(path: Path) -> StepGrowth | None:
    """None: the file is older than this figure. Raises CalibrationFileError."""
    return read_calibration(path, _File).step_growth


def with_growth(settings: PolicySettings, growth: StepGrowth | None) -> PolicySettings:
    """The same with what was measured, where nothing else is set."""
    if growth is None:
        return settings
    chosen = settings.headroom
    measured = {name: value for name, value in growth.model_dump().items() if name not in chosen.model_fields_set}
    return settings.model_copy(update={"headroom": chosen.model_copy(update=measured)})
