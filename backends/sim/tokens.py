"""Tokens and "KV" of the simulated engine: a hash chain, so that an exact continuation proves that prompt, output and
KV arrived whole.

The KV of slot j is a CRC-32 of tokens [0, j], made from slot j-1 and token j alone. The next token is a function of the
last slot. So a wrong token, a missing slot or a wrong one changes everything after it."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from meshift.schemas.logprobs import Logprobs
from meshift.schemas.requests import Sampling

SLOT_BYTES = 4

_MASK = 0xFFFF_FFFF
# Odd multipliers (2^32 / golden ratio, and a prime) spread the CRC, which is linear, over the vocabulary.
_SPREAD_TOKEN = 0x9E37_79B1
_SPREAD_EOS = 0x85EB_CA77


@dataclass(frozen=True, slots=True)
class TokenSource:
    """What all requests of an engine draw from."""

    low: int
    vocabulary: int
    eos_token_id: int
    eos_per_million: int


class Generation:
    """The tokens of one request, generated when asked for."""

    __slots__ = (
        "_eos_below",
        "_hash",
        "_salt",
        "_slots",
        "_source",
        "_stops",
        "limit",
        "prompt",
        "sampling",
        "stopped",
        "tokens",
        "wants_logprobs",
    )

    def __init__(self, source: TokenSource, prompt: Sequence[int], output: Sequence[int], sampling: Sampling) -> None:
        self.tokens = array("i", prompt)
        """Prompt and output, as far as known; may run ahead of the engine."""
        self.tokens.extend(output)
        self.prompt = len(prompt)
        self.sampling = sampling
        self.wants_logprobs = sampling.logprobs is not None
        self.limit = sampling.max_new_tokens
        """The length of the whole output; right from the prefill (or the arrival) on."""
        self.stopped: int | None = None
        """The stop token, if the output ends with one."""
        self._source = source
        self._salt = _salt(sampling)
        heeds = not sampling.ignore_eos
        self._stops = frozenset(sampling.stop_token_ids) if heeds else frozenset()
        self._eos_below = (source.eos_per_million << 32) // 1_000_000 if heeds else 0
        self._hash = 0
        self._slots = array("I")

    def prefill(self, output_count: int) -> None:
        """Compute the KV of the prompt and the first `output_count` tokens of the output, from the tokens."""
        self._extend(output_count)
        del self.tokens[self.prompt + output_count :]
        self._hash = crc32(self.tokens.tobytes())
        self._slots = array("I")
        self._find_limit()

    def arrive(self, slots: "array[int]") -> None:
        """Take KV that was copied here: of all tokens but the last, which the next step computes."""
        before = len(self.tokens) - 1
        self._slots = slots[:before]
        self._slots[-1] = self._attend(self._slots)
        self._hash = crc32(self.tokens[-1:].tobytes(), self._slots[-1])
        self._find_limit()

    def replace(self, slots: "array[int]", output_count: int) -> None:
        """The KV of the first tokens lies elsewhere from now on, as `slots` (some may be missing, or old). What is
        wrong with it changes all tokens after the first `output_count` of the output; their number stays."""
        known = self.prompt + output_count - 1
        if slots.tobytes() == self.slots(0, known):
            return
        del self.tokens[self.prompt + output_count :]
        self._slots = slots[:known]
        self._hash = crc32(self.tokens[-1:].tobytes(), self._attend(self._slots))

    def output(self, start: int, end: int) -> tuple[int, ...]:
        """Tokens [start, end) of the output."""
        if len(self.tokens) < self.prompt + end:
            self._extend(end)
        return tuple(self.tokens[self.prompt + start : self.prompt + end])

    def logprobs(self, start: int, end: int) -> Logprobs | None:
        """Made-up log-probabilities of tokens [start, end) of the output, if the request asked for them: functions of
        all tokens up to their own."""
        top = self.sampling.logprobs
        if top is None:
            return None
        made = Logprobs(top)
        tokens = self.output(start, end)
        low, span = self._source.low, self._source.vocabulary - self._source.low
        value = crc32(self.tokens[: self.prompt + start].tobytes())
        for token in tokens:
            value = crc32(token.to_bytes(SLOT_BYTES, "little"), value)
            logprob = -(value >> 16) / 4096
            likeliest = [token, *(low + (value + place) % span for place in range(1, top))][:top]
            made.append(logprob, ((other, logprob - place) for place, other in enumerate(likeliest)))
        return made

    def first(self, count: int) -> tuple[int, ...]:
        """The first `count` tokens of prompt and output."""
        self._extend(count - self.prompt)
        return tuple(self.tokens[:count])

    def slots(self, start: int, end: int) -> bytes:
        """The KV of tokens [start, end), packed."""
        self._extend(end - self.prompt)
        self._fill_slots(end)
        return self._slots[start:end].tobytes()

    def _fill_slots(self, end: int) -> None:
        slots, known = self._slots, len(self._slots)
        data = self.tokens[known:end].tobytes()
        value = slots[-1] if slots else 0
        for offset in range(0, len(data), SLOT_BYTES):
            value = crc32(data[offset : offset + SLOT_BYTES], value)
            slots.append(value)

    def _attend(self, slots: "array[int]") -> int:
        """What a step reads from the KV: the last slot, if all of them are those of the tokens."""
        value, right = 0, array("I")
        data = self.tokens[: len(slots)].tobytes()
        for offset in range(0, len(data), SLOT_BYTES):
            value = crc32(data[offset : offset + SLOT_BYTES], value)
            right.append(value)
        return value if right == slots else crc32(slots.tobytes(), ~value & _MASK)

    def _find_limit(self) -> None:
        self.stopped = None
        self.limit = self.sampling.max_new_tokens
        if self._stops or self._eos_below:
            self._extend_to_stop()

    def _extend(self, output_count: int) -> None:
        """Have at least that many tokens of the output."""
        tokens, value, salt = self.tokens, self._hash, self._salt
        low = self._source.low
        span = self._source.vocabulary - low
        for _ in range(self.prompt + output_count - len(tokens)):
            token = low + ((((value ^ salt) * _SPREAD_TOKEN & _MASK) * span) >> 32)
            tokens.append(token)
            value = crc32(token.to_bytes(4, "little"), value)
        self._hash = value

    def _extend_to_stop(self) -> None:
        """Generate ahead until a stop token or the greatest length: the engine must know when the request ends."""
        earliest = self.prompt + self.sampling.min_new_tokens
        while len(self.tokens) < self.prompt + self.limit:
            heeded = len(self.tokens) >= earliest
            token = self._next(heeded)
            self.tokens.append(token)
            self._hash = crc32(token.to_bytes(4, "little"), self._hash)
            if heeded and (token in self._stops or (self._eos_below and token == self._source.eos_token_id)):
                self.stopped, self.limit = token, len(self.tokens) - self.prompt

    def _next(self, may_end: bool) -> int:
        value = self._hash ^ self._salt
        if may_end and (value * _SPREAD_EOS & _MASK) < self._eos_below:
            return self._source.eos_token_id
        low = self._source.low
        return low + (((value * _SPREAD_TOKEN & _MASK) * (self._source.vocabulary - low)) >> 32)


def _salt(sampling: Sampling) -> int:
    if sampling.temperature == 0 or sampling.seed is None:
        return 0
    return crc32(str(sampling.seed).encode())
