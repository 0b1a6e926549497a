"""Collects what a step gave, from SGLang's requests into a report's columns."""

from array import array
from typing import Any, Final

from meshift.backends.sglang import wire
from meshift.schemas.requests import FinishReason

_BROKEN_LOGITS: Final = "NaN happened"
"""What SGLang reports as a matched stop string when a sampled token is outside the vocabulary."""


class StepRows:
    """The rows of the next report."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._tickets: list[int] = []
        self._starts: list[int] = []
        self._counts: list[int] = []
        self._tokens = array("i")
        self._finishes: list[wire.FinishRow] = []

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, ticket: int, start: int, tokens: Any, finish: wire.FinishRow | None) -> None:
        """One request's new tokens, from index `start` of its output on."""
        if finish is not None:
            self._finishes.append(finish)
        self._tickets.append(ticket)
        self._starts.append(start)
        self._counts.append(len(tokens))
        self._tokens.extend(iter(tokens))

    def take(self, iteration: int, load: wire.LoadSnapshot) -> wire.StepReport:
        """The report of all rows so far; starts anew."""
        report = wire.StepReport(
            iteration=iteration,
            tickets=self._tickets,
            starts=self._starts,
            counts=self._counts,
            tokens=self._tokens.tobytes(),
            finishes=self._finishes,
            load=load,
        )
        self._clear()
        return report


def take_new_tokens(req: Any) -> tuple[int, Any]:
    """(start, tokens) of what a request has to stream now; advances its offset.

    Ends with the token that stops it, if one does. Held back while the tail may become a stop string.
    """
    start = req.send_token_offset
    if not req.finished() and req.check_match_stop_str_prefix():
        return start, ()
    through_stop = req.output_ids_through_stop
    req.send_token_offset = max(start, len(through_stop))
    return start, through_stop[start:]


def finish_row(row: int, req: Any, reason: Any, cancelled: bool) -> wire.FinishRow:
    """A finish from SGLang's finish reason in its JSON form (None: an abort without one)."""
    name, matched, message = _explain(reason or {"type": "abort"}, cancelled)
    return wire.FinishRow(
        row=row,
        reason=name,
        matched_stop=matched,
        message=message,
        cached_tokens=req.cached_tokens,
        preemptions=req.retraction_count,
        preemption_loss_ns=req.mesh.preemption_loss_ns,
    )


def _explain(reason: dict[str, Any], cancelled: bool) -> tuple[str, str | int | None, str]:
    kind = reason["type"]
    if kind == "stop":
        matched = reason["matched"]
        if matched == _BROKEN_LOGITS:
            return FinishReason.ERROR.value, None, "the model gave a token outside its vocabulary"
        return FinishReason.STOP.value, matched[0] if isinstance(matched, list) else matched, ""
    if kind == "length":
        return FinishReason.LENGTH.value, None, ""
    if cancelled:
        return FinishReason.CANCELLED.value, None, ""
    return FinishReason.ERROR.value, None, str(reason.get("message") or "aborted by the engine")
