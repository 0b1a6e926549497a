"""What `meshift calibrate` found, as a file that workers, `meshift up` and `meshift simulate` take."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from meshift.backends.sim.parameters import SimParameters
from meshift.services.calibration.growth import StepGrowth
from meshift.services.calibration.reading import read_calibration
from meshift.services.worker.policy.virtual_usage import VirtualUsageSettings


class FitQuality(BaseModel):
    """How far the fitted model is from its own measurements: relative errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    decode_error_p50: float
    decode_error_max: float
    prefill_error_p50: float
    prefill_error_max: float


class Calibration(BaseModel):
    """One instance, measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    model: str
    engine: str
    capacity: int
    """Tokens of KV."""
    request_tokens: int
    """Prompt of the typical request by which target loads were found."""
    percentile: float
    """Of the steps at a load, that the limits hold for."""
    parameters: SimParameters
    """Fitted: decode and prefill. As measured: capacity and page. The rest are the defaults."""
    virtual_usage: VirtualUsageSettings
    limits_ms: dict[str, float]
    """Class -> ms a token."""
    loads: tuple[tuple[int, float], ...]
    """Tokens of typical requests on the instance, and ms a token at that percentile."""
    quality: FitQuality
    step_growth: StepGrowth | None = None
    """None: the file was written before schedulers took this."""


def load_calibration(path: Path) -> Calibration:
    """Raises CalibrationFileError."""
    return read_calibration(path, Calibration)


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Replace the file at once as a whole. Raises OSError."""
    draft = path.with_name(path.name + ".new")
    draft.write_text(calibration.model_dump_json(indent=1) + "\n")
    draft.replace(path)
