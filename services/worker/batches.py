"""One token message per step and frontend."""

from array import array
from collections.abc import Sequence

from meshift.schemas.identity import Owner
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

    def add(self, record: RequestRecord, start: int, tokens: Sequence[int]) -> None:
        """A row with these tokens of the record, and its finish if it has one."""
        if record.finish is not None:
            self._finishes.append(TokenFinish(row=len(self._request_ids), finish=record.finish))
        self._request_ids.append(record.key.request_id)
        self._attempts.append(record.key.attempt)
        self._hops.append(record.key.hop)
        self._starts.append(start)
        self._counts.append(len(tokens))
        self._tokens.extend(tokens)

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
        )
