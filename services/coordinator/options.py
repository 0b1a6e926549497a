"""What can be set about a coordinator."""

from pydantic import BaseModel, Field


class CoordinatorOptions(BaseModel):
    """Timing of a coordinator."""

    instance_timeout_s: float = Field(2.0, gt=0, description="silence after which an instance is taken for lost")
    look_interval_s: float = Field(0.5, gt=0, description="how often it looks for instances that are silent")
    convergence_poll_s: float = Field(0.05, gt=0, description="how often it looks how much lags behind")
    ask_timeout_s: float = Field(2.0, gt=0, description="time for a worker's answer; then it is asked again")
    retry_s: float = Field(0.2, gt=0, description="pause before a worker that didn't answer is asked again")
    plan_tries_max: int = Field(3, ge=1, description="how often a worker is asked before a change is refused")
    undecided_s: float = Field(
        300.0, gt=0, description="time for an instance that lives but doesn't answer to say what became of a change"
    )
