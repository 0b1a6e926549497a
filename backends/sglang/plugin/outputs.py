"""Collects what a step gave, from SGLang's requests into a report's columns."""

from array import array
from typing import Any, Final

from meshift.backends.sglang import wire
from meshift.schemas.logprobs import Logprobs
from meshift.schemas.requests import FinishReason

_COSTLY_SCHEMA: Final = "Grammar preprocessing timed out"
_REFUSED_SCHEMAS: Final = ("Failed to compile json grammar", _COSTLY_SCHEMA)
"""How SGLang's messages begin when a schema can't be obeyed."""

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
        self._logprob_rows: list[int] = []
        self._logprobs: list[Logprobs] = []
        self._prefill_starts_ns: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def add(
        self,
        ticket: int,
        start: int,
        tokens: Any,
        finish: wire.FinishRow | None,
        logprobs: Logprobs | None = None,
        prefill_start_ns: int | None = None,
    ) -> None:
        """One request's new tokens, from index `start` of its output on."""
        if prefill_start_ns is not None:
            self._prefill_starts_ns[len(self._tickets)] = prefill_start_ns
        if logprobs is not None:
            self._logprob_rows.append(len(self._tickets))
            self._logprobs.append(logprobs)
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
            logprobs=self._logprob_columns() if self._logprobs else None,
            load=load,
            prefill_starts_ns=self._prefill_starts_ns,
        )
        self._clear()
        return report

    def _logprob_columns(self) -> wire.LogprobColumns:
        return wire.LogprobColumns(
            rows=self._logprob_rows,
            tops=[item.top for item in self._logprobs],
            values=b"".join(item.values.tobytes() for item in self._logprobs),
            top_tokens=b"".join(item.top_tokens.tobytes() for item in self._logprobs),
        )


def logprobs_of(req: Any, start: int, count: int) -> Logprobs | None:
    """Of `count` tokens from index `start` of the output on; None if the request asked for none.

    SGLang keeps those of the tokens that it generated, from the first one after the earlier output on.
    """
    top = req.mesh.logprobs
    if top is None or not count:
        return None
    first = start - req.mesh.earlier
    given, made = req.logprob, Logprobs(top)
    for place in range(first, first + count):
        pairs = (
            zip(given.output_top_logprobs_idx[place], given.output_top_logprobs_val[place], strict=True) if top else ()
        )
        made.append(given.output_token_logprobs_val[place], pairs)
    return made


def prefill_start_ns(req: Any, start: int, count: int) -> int | None:
    """When the prefill of a request began, on the monotonic clock; None unless these `count` tokens from index `start`
    of the output on are its first ones here, or if it was preempted meanwhile, or came with its KV and had none."""
    if start != req.mesh.earlier or not count or req.retraction_count:
        return None
    # SGLang stamps with `perf_counter`, which is the monotonic clock on Linux.
    entry_s = req.time_stats.forward_entry_time
    return int(entry_s * 1e9) if entry_s else None


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
    refused_schema = message.startswith(_REFUSED_SCHEMAS)
    if refused_schema and _COSTLY_SCHEMA in message:
        # SGLang's goes on with the whole schema.
        message = "the schema takes too long to compile; make it simpler"
    return wire.FinishRow(
        row=row,
        reason=name,
        matched_stop=matched,
        message=message,
        param="json_schema" if refused_schema else None,
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
