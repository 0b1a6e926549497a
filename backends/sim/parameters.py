"""The timing model's numbers. All times are whole nanoseconds, so that taking many steps at once is exact."""

import hashlib
from typing import NamedTuple, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field

CountT = TypeVar("CountT", int, float)
"""Floats are means."""


class StepCost(NamedTuple):
    """A decode step takes `base + request * (requests in the batch) + token * (tokens in the batch)` ns, and `shared`
    more unless one request is alone."""

    base: int
    request: int
    token: int
    shared: int

    def step_ns(self, requests: CountT, tokens: CountT) -> CountT:
        """Of a batch of so many requests that hold so many tokens together; of the mean of several, too."""
        shared = self.shared if requests > 1 else 0
        return self.base + shared + self.request * requests + self.token * tokens


class SimParameters(BaseModel):
    """What a simulated engine is. The defaults are LLaMA-7B on an A10 with an engine of 2023: 13,616 tokens of KV of
    0.5 MB each, moved at 1.5 GB/s. Tokens unless said."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    capacity: int = Field(default=13_616, ge=1)
    """KV memory; only whole pages of it are used."""
    page_size: int = Field(default=16, ge=1)

    decode_step_ns: int = Field(default=28_000_000, ge=1)
    decode_request_ns: int = Field(default=350_000, ge=0)
    decode_token_ns: int = Field(default=2_200, ge=0)
    """A decode step takes `step + request * requests + token * tokens in the batch`."""
    decode_shared_ns: int = Field(default=0, ge=0)
    """And so much more where it isn't of one request alone: products of a matrix and one vector are often faster."""

    prefill_batch_ns: int = Field(default=20_000_000, ge=1)
    prefill_token_ns: int = Field(default=300_000, ge=0)
    prefill_token_squared_ns: int = Field(default=5, ge=0)
    """A prefill batch takes `batch + sum(token * n + token_squared * n * n)` for n new tokens of each request."""
    prefill_tokens_max: int = Field(default=12_800, ge=1)
    """Most tokens of one prefill batch; a longer prompt goes alone."""

    kv_token_bytes: int = Field(default=500_000, ge=1)
    copy_token_ns: int = Field(default=333_333, ge=0)
    """Gather and stage the KV of one token."""
    copy_round_ns: int = Field(default=5_000_000, ge=0)
    """Beside it, for each round of a move."""
    cutover_ns: int = Field(default=25_000_000, ge=0)
    """The shortest time that the last round takes, freeze to runnable."""
    copying_slowdown_percent: int = Field(default=1, ge=0)
    """How much longer a decode step takes while some request is being copied out or in."""
    send_timeout_ns: int = Field(default=10_000_000_000, ge=1)
    """The longest that the transport may take for one round."""

    cold_start_ns: int = Field(default=0, ge=0)

    token_low: int = Field(default=3, ge=0)
    """Generated tokens are in [token_low, vocabulary size)."""
    eos_token_id: int = Field(default=2, ge=0)
    eos_per_million: int = Field(default=0, ge=0, le=1_000_000)
    """How often the end-of-sequence token takes the place of another, where the request heeds it."""

    @property
    def pages(self) -> int:
        """Whole pages of the capacity."""
        return self.capacity // self.page_size

    def pages_of(self, tokens: int) -> int:
        """Pages that hold that many tokens of one request."""
        return -(-tokens // self.page_size)

    def step_cost(self, copying: bool) -> StepCost:
        """Coefficients of a decode step. The slowdown is on each coefficient, so that steps still grow by an equal
        whole number of nanoseconds."""
        percent = 100 + (self.copying_slowdown_percent if copying else 0)
        return StepCost(
            self.decode_step_ns * percent // 100,
            self.decode_request_ns * percent // 100,
            self.decode_token_ns * percent // 100,
            self.decode_shared_ns * percent // 100,
        )

    def prefill_ns(self, tokens: int, squares: int) -> int:
        """Time of a prefill batch of `tokens` new tokens, `squares` being the sum of the squares by request."""
        return self.prefill_batch_ns + self.prefill_token_ns * tokens + self.prefill_token_squared_ns * squares

    def copy_ns(self, tokens: int) -> int:
        """Time of one round of a move."""
        return self.copy_round_ns + self.copy_token_ns * tokens

    def faster(self, speed: float) -> Self:
        """The same engine on hardware `speed` times as fast (for use on a real clock)."""
        times = {
            name: max(1 if name in ("decode_step_ns", "prefill_batch_ns") else 0, round(value / speed))
            for name, value in self.model_dump().items()
            if name.endswith("_ns") and name != "send_timeout_ns"
        }
        return self.model_copy(update=times)

    def parameters_hash(self) -> str:
        """Names these numbers in results: 16 hexadecimal digits."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]
