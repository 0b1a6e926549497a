"""What can be set about a worker."""

from pydantic import BaseModel, Field

from meshift.services.worker.policy.virtual_usage import VirtualUsageSettings


class WorkerOptions(BaseModel):
    """Timing and bounds of a worker."""

    report_interval_s: float = Field(0.1, gt=0, description="how often it reports its load")
    memory_interval_s: float = Field(15.0, gt=0, description="how often it looks at its KV memory, for metrics")
    lease_ttl_s: float = Field(5.0, gt=0, description="how long a new request runs before its frontend's first lease")
    resend_s: float = Field(
        1.0, gt=0, description="how long a finish waits for its acknowledgement before it is sent again"
    )
    tombstone_s: float = Field(60.0, gt=0, description="how long a closed request is remembered")
    requests_max: int = Field(4096, gt=0, description="requests held at once; more are refused")
    engine_stall_s: float = Field(
        120.0,
        gt=0,
        description="time without a step, while requests run, after which the engine counts as dead",
    )
    drain_deadline_s: float = Field(30.0, ge=0, description="time for running requests to end when it is told to stop")
    acknowledge_wait_s: float = Field(
        2.0, ge=0, description="time for the last finishes to be acknowledged before it leaves"
    )
    stop_deadline_s: float = Field(
        5.0, gt=0, description="time for the engine's processes to end before they are killed"
    )
    gives_max: int = Field(1, ge=1, description="requests that it gives away at once because the scheduler says so")
    give_cooldown_s: float = Field(5.0, ge=0, description="time in which a request that moved here is given away last")
    give_growth_tokens: int = Field(32, ge=0, description="room that a request needs beside its tokens to move")
    give_retry_s: float = Field(
        5.0, ge=0, description="time in which a request isn't given again to where a move of it came to nothing"
    )
    give_deadline_s: float = Field(30.0, gt=0, description="deadline of such a move")
    virtual_usage: VirtualUsageSettings = Field(
        default_factory=VirtualUsageSettings, description="priority classes and their headroom"
    )
    moves_out_max: int = Field(4, ge=0, description="requests that move away at once")
    moves_in_max: int = Field(8, ge=0, description="requests that move here at once")
    move_stages_max: int = Field(3, ge=2, description="rounds of a live move, the last one with the request stopped")
    move_final_pages: int = Field(2, ge=1, description="pages of KV that a live move sends with the request stopped")
    move_timeout_s: float = Field(2.0, gt=0, description="deadline of what source and destination ask each other")
    move_freeze_timeout_s: float = Field(
        5.0, gt=0, description="time for the step boundary and the last round of a live move; then it stays"
    )
    move_retry_s: float = Field(0.2, gt=0, description="pause before it is asked again who owns a request")
    reservation_s: float = Field(10.0, gt=0, description="how long a destination keeps room that nobody renews")
    moved_kept_s: float = Field(
        600.0, gt=0, description="how long it is remembered where a request went, if nobody says that it is over"
    )
    layout_timeout_s: float = Field(5.0, gt=0, description="deadline of what the engine is asked about its layout")
    layout_commit_timeout_s: float = Field(
        120.0, gt=0, description="time for all stages to switch to a new layout; then it is asked whether they have"
    )
    layout_moves_wait_s: float = Field(
        5.0, gt=0, description="time for requests that are moving to be somewhere, before a layout is committed"
    )
    layout_lease_s: float = Field(
        10.0, gt=0, description="how long a change of the layout lives without a coordinator that asks for it"
    )
    layout_look_s: float = Field(1.0, gt=0, description="how often it looks whether its engine has undone a change")
    layout_close_poll_s: float = Field(0.005, gt=0, description="how often it looks whether requests are still moving")
    layout_retry_s: float = Field(0.2, gt=0, description="pause before an engine that didn't answer is asked again")
    drain_retry_s: float = Field(1.0, gt=0, description="pause before a drain tries again to move a request")
