"""Our part of a rank: acts on the worker's commands and reports steps, load and integrity.

Every rank runs the same code on the same ordered stream and so decides the same; only the leading rank reports.
`iteration` counts calls of `ingest_requests`: an equal number is an equal point of the stream on all ranks.
Handlers run before the stream is relayed to the next stage, so they never wait and never change a command.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.runtime_context import get_parallel

from meshift.backends.base import Refusal
from meshift.backends.sglang import wire, wire_moves
from meshift.backends.sglang.plugin import accounting, grammar, outputs, requests
from meshift.backends.sglang.plugin.batches import Batches
from meshift.backends.sglang.plugin.context import RankContext
from meshift.backends.sglang.plugin.data_plane import DataPlane
from meshift.backends.sglang.plugin.kv import RankKv, describe
from meshift.backends.sglang.plugin.layers.rank import RankLayers
from meshift.backends.sglang.plugin.moves_in import MovesIn
from meshift.backends.sglang.plugin.moves_out import MovesOut
from meshift.backends.sglang.plugin.schemas import Schemas
from meshift.schemas.base import count_tokens

HEARTBEAT_S = 0.25
"""The load is reported at least this often while the scheduler's loop turns."""

IDLE_S = 1.0
"""How long an idle loop sleeps, as SGLang's own does: commands wake it."""


LEARNING_NAP_S = 0.005
"""While a schema is compiled of which nothing else will tell."""


class RankAgent:
    """One per scheduler."""

    def __init__(self, scheduler: Any, context: RankContext) -> None:
        self._scheduler = scheduler
        self._context = context
        self._live: dict[str, Any] = {}
        self._cancelled: set[str] = set()
        self._unheard_cancels: list[wire.Cancel] = []
        self._rows = outputs.StepRows()
        self._submits_seen = 0
        self._queue_changed = False
        self._flush_wanted = False
        self._reported_s = 0.0
        self._batches = Batches(scheduler, lambda: self.iteration)
        self.iteration = -1
        self.rank = context.rank
        self.step_ended_ns = 0
        """Monotonic time at which the last step's results were processed."""
        self.prefill_tokens = 0
        """Whose KV prefill steps have computed since the start."""
        self.moves_out: MovesOut
        self.moves_in: MovesIn
        self.schemas = Schemas(
            lambda: scheduler.grammar_manager.grammar_backend,
            lambda nonce: self.answer(wire_moves.Learned, nonce),
            grammar.COMPILE_S_MAX,
        )
        self.layers: RankLayers

    def start_moving(self, data: DataPlane) -> None:
        """The KV pool exists: requests may leave and arrive."""
        kv = RankKv(self._scheduler.token_to_kv_pool_allocator.get_kvcache(), describe(self._scheduler))
        self.moves_out = MovesOut(self._scheduler, self, self._batches, kv, data)
        self.moves_in = MovesIn(self._scheduler, self, self._batches, kv, data)
        self.layers = RankLayers(self._scheduler, self, kv, data)

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """What SGLang's dispatcher calls for each command."""
        return {
            wire.Submit: self._submit,
            wire.Cancel: self._cancel,
            wire.CheckIntegrity: self._check_integrity,
            wire.FlushCache: self._flush_cache,
            wire.ResizeKv: self._resize,
            wire.AskMemory: self._tell_memory,
            wire.Commit: self._commit,
            wire_moves.BeginMove: self.moves_out.begin,
            wire_moves.SendDelta: self.moves_out.send,
            wire_moves.Freeze: self.moves_out.freeze,
            wire_moves.Release: self.moves_out.release,
            wire_moves.Resume: self.moves_out.resume,
            wire_moves.Reserve: self.moves_in.reserve,
            wire_moves.HashReserved: self.moves_in.hash_reserved,
            wire_moves.Quiesce: self.moves_in.quiesce,
            wire_moves.Unreserve: self.moves_in.unreserve,
            wire_moves.Recall: self.moves_in.recall,
            wire_moves.LearnSchema: self.schemas.learn,
            wire_moves.KeepSchema: self.schemas.keep,
            **self.layers.handlers(),
        }

    # ---- seams of the scheduler's loop ----

    def begin_iteration(self) -> None:
        """Before the iteration's commands are taken from the stream."""
        self.iteration += 1
        retries, self._unheard_cancels = self._unheard_cancels, []
        for command in retries:
            self._cancel(command)
        if self._flush_wanted:
            self._try_flush()
        self.schemas.look()

    def end_ingest(self) -> None:
        """After the iteration's commands: report what they changed."""
        overdue = time.monotonic() - self._reported_s >= HEARTBEAT_S
        if len(self._rows) or self._queue_changed or overdue:
            self._report()

    def end_step(self, prefilled: int = 0) -> None:
        """After a step's results were processed, which computed the KV of `prefilled` tokens, if it was a prefill."""
        self.prefill_tokens += prefilled
        self.step_ended_ns = time.monotonic_ns()
        self._report()

    def at_boundary(self, running_batch: Any) -> Any:
        """Before the next batch of this micro-batch is chosen: its running batch without those that leave now, and
        with those that enter."""
        self._answer_resizes(self._scheduler.kv_capacity.go_on(self.rank, self.iteration))
        self.moves_out.act()
        return self._batches.merge_into(running_batch)

    @property
    def is_idle(self) -> bool:
        """Whether no move holds anything here, and no commit of layers is under way."""
        moves_idle = self.moves_out.is_idle and not (len(self._batches) or len(self.moves_in.reservations))
        return moves_idle and self.layers.is_idle

    @property
    def has_work(self) -> bool:
        """Whether the next boundary brings anything by itself."""
        waits = self._scheduler.kv_capacity.has_work or not self.layers.is_idle
        return bool(len(self._batches)) or self.moves_out.has_work or waits

    @property
    def sleep_s(self) -> float:
        """How long the loop may sleep, where it has no requests: not long while something is tried anew each turn, a
        move holds memory, or later stages, which turn with this one, may have to end what has ended here."""
        if self.schemas.has_work:
            return LEARNING_NAP_S
        is_waiting = self._flush_wanted or bool(self._unheard_cancels) or self.has_work or not self.is_idle
        return HEARTBEAT_S if is_waiting or get_parallel().pp_size > 1 else IDLE_S

    def _report(self) -> None:
        self._queue_changed = False
        self._reported_s = time.monotonic()
        if not self._context.leads:
            return
        load = accounting.measure(self)
        has_rows = len(self._rows) > 0
        self._context.outbox.send(self._rows.take(self.iteration, load) if has_rows else load)

    # ---- commands ----

    def _submit(self, command: wire.Submit) -> None:
        self._submits_seen += 1
        self._queue_changed = True
        scheduler = self._scheduler
        try:
            received = requests.to_sglang(command, scheduler.tokenizer, scheduler.model_config.vocab_size)
        except ValueError as error:
            self._refuse(command, str(error))
            return
        scheduler.handle_generate_request(received)

    def _refuse(self, command: wire.Submit, message: str) -> None:
        if not self._context.leads:
            return
        finish = wire.FinishRow(
            row=len(self._rows),
            reason="error",
            matched_stop=None,
            message=message,
            param=None,
            cached_tokens=0,
            preemptions=0,
            preemption_loss_ns=0,
        )
        self._rows.add(command.ticket, count_tokens(command.output), (), finish)

    def _cancel(self, command: wire.Cancel) -> None:
        req = self._live.get(command.rid)
        if req is None or req.finished():
            return
        self._cancelled.add(command.rid)
        self._queue_changed = True
        if self.moves_out.cancel(req):
            return
        if req in self._batches.entering:
            req.to_finish = FINISH_ABORT()
            return
        self._scheduler.abort_request(AbortReq(rid=command.rid))
        heard = command.rid not in self._live or req.to_finish is not None
        if not heard and self._scheduler._pending_chunked_abort_req is not req:
            # Between two of SGLang's lists for this moment; it is in one of them at the next iteration.
            self._unheard_cancels.append(command)

    def _check_integrity(self, command: wire.CheckIntegrity) -> None:
        self._report()
        self._context.outbox.send(
            wire.IntegrityReport(
                rank=self._context.rank,
                nonce=command.nonce,
                iteration=self.iteration,
                fingerprint=accounting.fingerprint(self),
                problems=accounting.find_problems(self),
            )
        )

    def _resize(self, command: wire.ResizeKv) -> None:
        self._queue_changed = True
        self._answer_resizes(self._scheduler.kv_capacity.resize(command, self.rank, self.iteration))

    def _answer_resizes(self, answers: Sequence[wire.KvResized]) -> None:
        """The load first, so that the worker knows it by then."""
        if answers:
            self._report()
        for answer in answers:
            self._context.outbox.send(answer)

    def _tell_memory(self, command: wire.AskMemory) -> None:
        self._report()
        self._context.outbox.send(self._scheduler.kv_capacity.tell(command, self._context.rank, self.iteration))

    def _flush_cache(self, command: wire.FlushCache) -> None:
        self._flush_wanted = True

    def _try_flush(self) -> None:
        """Stages empty one after another: a pipeline is idle some iterations after its last request's finish."""
        if self._live:
            self._flush_wanted = False
        elif self._scheduler.is_fully_idle() and self._scheduler.flush_cache():
            self._flush_wanted = False
            self._queue_changed = True

    def _commit(self, command: wire.Commit) -> None:
        self._queue_changed = True
        self.moves_in.commit(command)

    # ---- what moves need ----

    @property
    def scheduler(self) -> Any:
        """SGLang's."""
        return self._scheduler

    @property
    def batches(self) -> Batches:
        """What is running and launched."""
        return self._batches

    @property
    def live(self) -> dict[str, Any]:
        """Requests that haven't ended here, by SGLang's ids."""
        return self._live

    @property
    def submits_seen(self) -> int:
        """Submits taken out of the stream."""
        return self._submits_seen

    def find(self, rid: str) -> Any:
        """A live request, or None."""
        return self._live.get(rid)

    def forget(self, req: Any) -> None:
        """It doesn't live here any more, and nobody is told."""
        self._live.pop(req.rid, None)
        self._cancelled.discard(req.rid)
        self._queue_changed = True

    def report_load(self) -> None:
        """Now, so that the worker knows it before it gets an answer."""
        self._report()

    def answer(self, kind: Callable[..., wire.Report], nonce: int, **fields: Any) -> None:
        """Tell the worker, as every rank does. What requests have to tell comes first: an answer may be the end of a
        request's name."""
        if len(self._rows):
            self._report()
        self._context.outbox.send(kind(rank=self.rank, nonce=nonce, iteration=self.iteration, **fields))

    def tell(self, report: wire.Report) -> None:
        """Tell the worker what it hasn't asked."""
        self._context.outbox.send(report)

    def refuse_move(self, nonce: int, refusal: Refusal, message: str) -> None:
        """Tell the worker that nothing was done."""
        self.answer(wire_moves.Refused, nonce, refusal=refusal.value, message=message)

    def flush_tokens(self, req: Any) -> None:
        """Report all tokens of a request now, also those that were held back because they may begin a stop string."""
        start, req.send_token_offset = req.send_token_offset, len(req.output_ids)
        if start < len(req.output_ids):
            self._add_row(req, start, req.output_ids[start:], None)
        self._report()

    # ---- life of a request ----

    def adopt(self, req: Any, received: Any) -> None:
        """SGLang has built a request."""
        requests.adopt(req, received)
        self._live[req.rid] = req

    def ends_on_arrival(self, req: Any) -> bool:
        """Whether a request that enters the queue for the first time needs no step: SGLang has refused it, it was
        cancelled while its schema was compiled, or a resumed one's output is complete already (its owner ended before
        it could say so). If so it is finished here."""
        # SGLang would give the log-probabilities of earlier output too, which were given before.
        req.logprob_start_len = -1
        if req.to_finish is None and req.mesh.just_resumed:
            grammar.replay_output(req)
            if req.to_finish is None:
                req.update_finish_state()
        req.mesh.just_resumed = False
        if req.to_finish is not None:
            req.finished_reason, req.to_finish = req.to_finish, None
        if not req.finished():
            return False
        self._scheduler._release_aborted_request(req)
        self.collect([req])
        return True

    def note_preemption(self, req: Any) -> None:
        """SGLang has taken a running request's memory and queued it again."""
        req.mesh.preempted_ns = time.monotonic_ns()

    def collect(self, reqs: Sequence[Any], skipped: Any = None) -> None:
        """Instead of SGLang's output stream: rows for what the requests have to tell."""
        for req in reqs:
            # The overlap scheduler brings a finished request a second time.
            if req is not skipped and not (req.finished() and req.finished_output):
                self._collect_one(req)

    def _collect_one(self, req: Any) -> None:
        if req.finished():
            req.finished_output = True
            if req.finished_len is None:
                req.finished_len = len(req.output_ids)
        start, tokens = outputs.take_new_tokens(req)
        self._end_preemption(req)
        reason = req.finished_reason.to_json() if req.finished() else None
        if len(tokens) or reason is not None:
            self._add_row(req, start, tokens, reason)

    def record_abort(self, req: Any, reason: Any) -> None:
        """Instead of SGLang's abort message: SGLang ended a request outside of the output stream."""
        req.finished_output = True
        if req.finished_reason is None:
            req.finished_reason = FINISH_ABORT()
        self._add_row(req, req.send_token_offset, (), reason or req.finished_reason.to_json())

    def _add_row(self, req: Any, start: int, tokens: Sequence[int], reason: Any) -> None:
        finish = None
        if reason is not None:
            self._live.pop(req.rid, None)
            cancelled = req.rid in self._cancelled
            self._cancelled.discard(req.rid)
            finish = outputs.finish_row(len(self._rows), req, reason, cancelled)
        if self._context.leads:
            logprobs = outputs.logprobs_of(req, start, len(tokens))
            begun_ns = outputs.prefill_start_ns(req, start, len(tokens))
            self._rows.add(req.mesh.ticket, start, tokens, finish, logprobs, begun_ns)

    def _end_preemption(self, req: Any) -> None:
        if req.mesh.preempted_ns is not None:
            req.mesh.preemption_loss_ns += time.monotonic_ns() - req.mesh.preempted_ns
            req.mesh.preempted_ns = None
