"""Log-probabilities of a request's tokens, packed: 8 bytes a value, 4 a token id, and no object for any of them."""

from array import array
from collections.abc import Iterable, Sequence
from typing import overload

from meshift.schemas.base import TOKEN_BYTES, unpack_tokens
from meshift.schemas.requests import LOGPROB_BYTES, LogprobColumns, TokenLogprob


class Logprobs(Sequence[TokenLogprob]):
    """One `TokenLogprob` a token, each with the same number `top` of likeliest tokens. Slices copy."""

    __slots__ = ("top", "top_tokens", "values")

    def __init__(self, top: int, values: "array[float] | None" = None, top_tokens: "array[int] | None" = None) -> None:
        self.top = top
        self.values = array("d") if values is None else values
        """Of the token itself, then of its `top` likeliest, token after token."""
        self.top_tokens = array("i") if top_tokens is None else top_tokens

    def __len__(self) -> int:
        return len(self.values) // (self.top + 1)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Logprobs):
            return NotImplemented
        return (self.top, self.values, self.top_tokens) == (other.top, other.values, other.top_tokens)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Logprobs({self.top}, {list(self)})"

    @staticmethod
    def token_bytes(top: int) -> int:
        """Packed size of one token's."""
        return LOGPROB_BYTES * (top + 1) + TOKEN_BYTES * top

    @property
    def byte_count(self) -> int:
        """Packed size."""
        return LOGPROB_BYTES * len(self.values) + TOKEN_BYTES * len(self.top_tokens)

    @overload
    def __getitem__(self, index: int) -> TokenLogprob: ...

    @overload
    def __getitem__(self, index: slice) -> "Logprobs": ...

    def __getitem__(self, index: "int | slice") -> "TokenLogprob | Logprobs":
        if isinstance(index, slice):
            start, end, step = index.indices(len(self))
            if step != 1:
                raise ValueError("only plain slices")
            return self._part(start, max(start, end))
        place = range(len(self))[index]
        first, top = place * (self.top + 1), self.top
        tokens = self.top_tokens[place * top : (place + 1) * top]
        return TokenLogprob(
            self.values[first], tuple(zip(tokens, self.values[first + 1 : first + 1 + top], strict=True))
        )

    def _part(self, start: int, end: int) -> "Logprobs":
        width, top = self.top + 1, self.top
        return Logprobs(top, self.values[start * width : end * width], self.top_tokens[start * top : end * top])

    def append(self, value: float, top: Iterable[tuple[int, float]]) -> None:
        """One token more. Raises ValueError if it hasn't `self.top` likeliest ones."""
        pairs = tuple(top)
        if len(pairs) != self.top:
            raise ValueError(f"{len(pairs)} likeliest tokens, not {self.top}")
        self.values.append(value)
        for token, logprob in pairs:
            self.top_tokens.append(token)
            self.values.append(logprob)

    def extend(self, others: Sequence[TokenLogprob]) -> None:
        """More tokens. Raises ValueError as `append`."""
        if not isinstance(others, Logprobs):
            for other in others:
                self.append(other.value, other.top)
        elif others.top != self.top:
            raise ValueError(f"{others.top} likeliest tokens, not {self.top}")
        else:
            self.values.extend(others.values)
            self.top_tokens.extend(others.top_tokens)


class ColumnsBuilder:
    """Collects rows for a message."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._tops: list[int] = []
        self._counts: list[int] = []
        self._values = array("d")
        self._top_tokens = array("i")

    def add(self, row: int, logprobs: Logprobs) -> None:
        """The log-probabilities of one row's tokens."""
        self._rows.append(row)
        self._tops.append(logprobs.top)
        self._counts.append(len(logprobs))
        self._values.extend(logprobs.values)
        self._top_tokens.extend(logprobs.top_tokens)

    def build(self) -> LogprobColumns | None:
        """The message's part; None if there was no row."""
        if not self._rows:
            return None
        return LogprobColumns(
            rows=tuple(self._rows),
            tops=tuple(self._tops),
            counts=tuple(self._counts),
            values=self._values.tobytes(),
            top_tokens=self._top_tokens.tobytes(),
        )


def pack_logprobs(logprobs: Logprobs) -> LogprobColumns | None:
    """Those of a message's only row."""
    builder = ColumnsBuilder()
    builder.add(0, logprobs)
    return builder.build()


def unpack_logprobs(columns: LogprobColumns) -> dict[int, Logprobs]:
    """By row."""
    return unpack_columns(columns.rows, columns.tops, columns.counts, columns.values, columns.top_tokens)


def unpack_columns(
    rows: Sequence[int], tops: Sequence[int], counts: Sequence[int], packed_values: bytes, packed_tokens: bytes
) -> dict[int, Logprobs]:
    """By row, from columns as in `LogprobColumns`."""
    values, top_tokens = array("d"), unpack_tokens(packed_tokens)
    values.frombytes(packed_values)
    by_row = {}
    first_value = first_token = 0
    for row, top, count in zip(rows, tops, counts, strict=True):
        end_value, end_token = first_value + count * (top + 1), first_token + count * top
        by_row[row] = Logprobs(top, values[first_value:end_value], top_tokens[first_token:end_token])
        first_value, first_token = end_value, end_token
    return by_row
