"""One token message per step and frontend."""

from array import array
from collections.abc import Sequence

from meshift.schemas.identity import Owner
from meshift.schemas.limits import LOGPROB_MESSAGE_BYTES_MAX
from meshift.schemas.logprobs import ColumnsBuilder, Logprobs
from meshift.schemas.requests import TokenBatch, TokenFinish
from meshift.services.worker.requests import RequestRecord


class BatchBuilder:
    """Collects rows for one frontend."""

    def __init__(self) -> None:
        self._request_ids: list[str] = []
        self._attempts: list[int] = []
        self._hops: list[int] = []
        self._starts: list[int] = []
        self._counts: list[int] = []
        self._tokens = array("i")
        self._finishes: list[TokenFinish] = []
        self._logprobs: ColumnsBuilder | None = None
        self._logprob_bytes = 0

    def add(self, record: RequestRecord, start: int, tokens: Sequence[int]) -> None:
        """A row with these tokens of the record, their log-probabilities if it has them, and its finish if it has
        one. Without tokens where the message would grow too large: they are missed and asked for."""
        if (
            record.logprobs is not None
            and tokens
            and not self._add_logprobs(record, record.logprobs, start, len(tokens))
        ):
            start, tokens = start + len(tokens), ()
        if record.finish is not None:
            self._finishes.append(TokenFinish(row=len(self._request_ids), finish=record.finish))
        self._request_ids.append(record.key.request_id)
        self._attempts.append(record.key.attempt)
        self._hops.append(record.key.hop)
        self._starts.append(start)
        self._counts.append(len(tokens))
        self._tokens.extend(tokens)

    def _add_logprobs(self, record: RequestRecord, known: Logprobs, start: int, count: int) -> bool:
        """For the row to come. Returns whether there is room."""
        self._logprob_bytes += count * Logprobs.token_bytes(known.top)
        if self._logprob_bytes > LOGPROB_MESSAGE_BYTES_MAX:
            return False
        if self._logprobs is None:
            self._logprobs = ColumnsBuilder()
        first = start - record.base
        self._logprobs.add(len(self._request_ids), known[first : first + count])
        return True

    def build(self, owner: Owner, emitted_ns: int) -> TokenBatch:
        """The message."""
        return TokenBatch(
            owner=owner,
            emitted_ns=emitted_ns,
            request_ids=tuple(self._request_ids),
            attempts=tuple(self._attempts),
            hops=tuple(self._hops),
            starts=tuple(self._starts),
            counts=tuple(self._counts),
            tokens=self._tokens.tobytes(),
            finishes=tuple(self._finishes),
            logprobs=None if self._logprobs is None else self._logprobs.build(),
        )
