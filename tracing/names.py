"""Names of spans, attributes, events and metrics: one place, so that dashboards and tests can rely on them.

Where OpenTelemetry's semantic conventions for generative AI have a name, it is theirs (`gen_ai.*`);
everything else is `meshift.*`. Units follow the conventions: seconds, bytes (`By`), tokens (`{token}`).

One request gives one trace:

    chat <model>                      frontend, server span: from the call to the last token
    +-- meshift.dispatch              frontend asks the scheduler for an instance
    +-- meshift.submit                frontend hands it to the worker
    |   +-- meshift.generate          worker: from the submission to the finish or the move away
    +-- meshift.move                  source worker; links the old and the new owner's span
    |   +-- meshift.move.round        one round of the live copy
    |   +-- meshift.move.cutover      the request is in no batch
    +-- meshift.resume                frontend, after an owner was lost
"""

from typing import Final

# ---- spans ----

DISPATCH: Final = "meshift.dispatch"
SUBMIT: Final = "meshift.submit"
GENERATE: Final = "meshift.generate"
RESUME: Final = "meshift.resume"

MOVE: Final = "meshift.move"
MOVE_RESERVE: Final = "meshift.move.reserve"
MOVE_ROUND: Final = "meshift.move.round"
MOVE_CUTOVER: Final = "meshift.move.cutover"

RECONFIGURE: Final = "meshift.reconfigure"
RECONFIGURE_FEASIBILITY: Final = "meshift.reconfigure.feasibility"
RECONFIGURE_RESIZE: Final = "meshift.reconfigure.resize"
RECONFIGURE_LOAD: Final = "meshift.reconfigure.load"
RECONFIGURE_COPY: Final = "meshift.reconfigure.copy"
RECONFIGURE_COMMIT: Final = "meshift.reconfigure.commit"

DRAIN: Final = "meshift.drain"
SCHEDULE_MOVES: Final = "meshift.schedule_moves"

OPERATION_CHAT: Final = "chat"
OPERATION_COMPLETION: Final = "text_completion"


def request_span(operation: str, model: str) -> str:
    """The name of a frontend's server span, as the conventions want it: `chat llama-7b`."""
    return f"{operation} {model}"


# ---- attributes: the conventions' ----

ERROR_TYPE: Final = "error.type"
OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_TOP_P: Final = "gen_ai.request.top_p"
REQUEST_TOP_K: Final = "gen_ai.request.top_k"
REQUEST_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
REQUEST_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
REQUEST_STOP_SEQUENCES: Final = "gen_ai.request.stop_sequences"
REQUEST_SEED: Final = "gen_ai.request.seed"
REQUEST_STREAM: Final = "gen_ai.request.stream"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
RESPONSE_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
USAGE_CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
TOKEN_TYPE: Final = "gen_ai.token.type"

# ---- attributes: ours ----

REQUEST_ID: Final = "meshift.request.id"
ATTEMPT: Final = "meshift.request.attempt"
HOP: Final = "meshift.request.hop"
PRIORITY_SCHEDULING: Final = "meshift.request.priority.scheduling"
PRIORITY_EXECUTION: Final = "meshift.request.priority.execution"
PREEMPTIONS: Final = "meshift.request.preemptions"

OWNER: Final = "meshift.owner"
"""`instance#incarnation`."""
SOURCE: Final = "meshift.source"
DESTINATION: Final = "meshift.destination"
STAGE: Final = "meshift.stage"
RANK: Final = "meshift.rank"
LAYOUT_EPOCH: Final = "meshift.layout.epoch"

DISPATCH_REASON: Final = "meshift.dispatch.reason"
DISPATCH_BYPASS: Final = "meshift.dispatch.bypass"
"""True if the frontend chose by itself, without a scheduler."""

TRANSFER_ID: Final = "meshift.transfer.id"
TRANSFER_STATE: Final = "meshift.transfer.state"
TRANSFER_ROUND: Final = "meshift.transfer.round"
TRANSFER_TOKENS: Final = "meshift.transfer.tokens"
TRANSFER_BYTES: Final = "meshift.transfer.bytes"
TRANSFER_WATERMARK: Final = "meshift.transfer.watermark"
TRANSFER_ABORT_REASON: Final = "meshift.transfer.abort_reason"
MOVE_OUTCOME: Final = "meshift.move.outcome"

# ---- events of spans ----

EVENT_FIRST_TOKEN: Final = "meshift.first_token"
EVENT_PREEMPTED: Final = "meshift.preempted"
EVENT_OWNER_CHANGED: Final = "meshift.owner_changed"
EVENT_OWNER_LOST: Final = "meshift.owner_lost"

# ---- metrics: the conventions' ----

METRIC_REQUEST_DURATION: Final = "gen_ai.server.request.duration"
"""Histogram, s."""
METRIC_TIME_TO_FIRST_TOKEN: Final = "gen_ai.server.time_to_first_token"
"""Histogram, s; queueing included."""
METRIC_TIME_PER_OUTPUT_TOKEN: Final = "gen_ai.server.time_per_output_token"
"""Histogram, s, after the first token."""
METRIC_TOKEN_USAGE: Final = "gen_ai.client.token.usage"
"""Histogram, {token}, by `TOKEN_TYPE`."""

# ---- metrics: ours ----

METRIC_KV_TOKENS: Final = "meshift.kv.tokens"
"""Gauge, {token}, by instance and `KV_STATE`; the states add up to the capacity."""
KV_STATE: Final = "meshift.kv.state"
"""`used`, `cached`, `free` or `reserved`."""
METRIC_REQUESTS: Final = "meshift.requests"
"""Gauge, {request}, by instance and `REQUEST_STATE`."""
REQUEST_STATE: Final = "meshift.request.state"
"""`running` or `waiting`."""
METRIC_FREENESS: Final = "meshift.freeness"
"""Gauge, {step}, by instance."""
METRIC_MOVES: Final = "meshift.moves"
"""Counter, {move}, by `MOVE_OUTCOME`."""
METRIC_MOVE_DOWNTIME: Final = "meshift.move.downtime"
"""Histogram, s: from the last step at the source to the first at the destination."""
METRIC_TRANSFER_BYTES: Final = "meshift.transfer.io"
"""Counter, By."""
METRIC_PREEMPTION_LOSS: Final = "meshift.preemption.loss"
"""Counter, s."""
METRIC_RECONFIGURE_STOP: Final = "meshift.reconfigure.stop"
"""Histogram, s: how long a commit holds the pipeline."""
METRIC_BUS_DROPPED: Final = "meshift.bus.dropped"
"""Counter, {message}: lost to a full queue."""
