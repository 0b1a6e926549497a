"""Every bound of the mesh that two services must agree on, in one place."""

MESSAGE_BYTES_MAX = 8 * 1024 * 1024
"""Largest payload of one bus message; `nats-server` runs with the same `max_payload`."""

MESSAGE_HEADROOM_BYTES = 64 * 1024
"""Left free below the limit for headers."""

PAYLOAD_BYTES_MAX = MESSAGE_BYTES_MAX - MESSAGE_HEADROOM_BYTES
"""Largest encoded body that a sender accepts."""

SUBSCRIPTION_QUEUE_MAX = 65_536
"""Messages that wait for one subscriber before the bus drops and reports it."""

PUBLISH_QUEUE_MAX = 65_536
"""Messages that wait for the connection before `publish` refuses."""

REQUESTS_IN_FLIGHT_MAX = 16_384
"""Requests of one bus client that may wait for their answers at once."""

ENDPOINT_CONCURRENCY_MAX = 1_024
"""Requests that one endpoint serves at once."""

REQUEST_ID_CHARS_MAX = 128
LOGPROBS_TOP_MAX = 20
LOGIT_BIAS_MAX = 300
JSON_SCHEMA_CHARS_MAX = 65_536
STOP_STRINGS_MAX = 16
STOP_STRING_CHARS_MAX = 256

LOGPROB_MESSAGE_BYTES_MAX = 1024 * 1024
"""Of packed log-probabilities in one message; more come with the next replay."""

MOVE_STATE_BYTES_MAX = 2 * 1024 * 1024
"""Of an engine's own state of one request, on the move."""

MOVE_PAIRS_MAX = 4_096
"""Pairs of ranks that exchange KV in one move."""

MOVES_LISTED_MAX = 256
"""Moves that a worker tells of at once."""

REQUESTS_LISTED_MAX = 10_000
"""Open requests that a frontend tells of at once."""

DECISIONS_LISTED_MAX = 256
"""Decisions that a scheduler tells of at once."""

LAUNCHED_MAX = 256
"""Instances that one launcher runs."""

REASON_CHARS_MAX = 1_024
"""Of a reason in words."""
