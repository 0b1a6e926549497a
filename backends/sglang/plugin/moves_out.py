"""A rank's part of moves away from here: how far a request is, its KV, its freeze, and what becomes of it then.

Handlers note what is to be done to running requests; it is done at the step boundary that follows.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestOutcome
from sglang.srt.mem_cache.common import release_kv_cache

from meshift.backends.base import Refusal
from meshift.backends.sglang import wire_moves as wire
from meshift.backends.sglang.plugin.batches import Batches
from meshift.backends.sglang.plugin.copying import Copy, row_reader
from meshift.backends.sglang.plugin.data_plane import DataPlane, Round
from meshift.backends.sglang.plugin.kv import RankKv
from meshift.schemas.base import pack_tokens

if TYPE_CHECKING:
    from meshift.backends.sglang.plugin.agent import RankAgent

Obstacle = tuple[Refusal, str]


@dataclass(slots=True)
class _Sending:
    """A round of a request that goes on."""

    req: Any
    command: wire.SendDelta
    copy: Copy
    round: Round


@dataclass(slots=True)
class _Leaving:
    """A request outside batch and queue, or, until `frozen`, on its way there."""

    req: Any
    command: wire.Freeze
    outside: bool = False
    """It is in no batch; a step with it may still be launched."""
    frozen: bool = False
    given_up: bool = False


class MovesOut:
    """The requests of one rank that leave."""

    def __init__(self, scheduler: Any, agent: "RankAgent", batches: Batches, kv: RankKv, data: DataPlane) -> None:
        self._scheduler = scheduler
        self._agent = agent
        self._batches = batches
        self._kv = kv
        self._data = data
        self._sending: list[_Sending] = []
        self._leaving: dict[str, _Leaving] = {}

    @property
    def frozen(self) -> list[Any]:
        """Requests that are in neither batch nor queue."""
        return [leaving.req for leaving in self._leaving.values() if leaving.frozen]

    @property
    def is_idle(self) -> bool:
        """Whether no request is frozen or on its way there."""
        return not self._leaving

    @property
    def has_work(self) -> bool:
        """Whether something is to be done at the next boundary."""
        return bool(self._sending) or any(not leaving.frozen for leaving in self._leaving.values())

    # ---- commands ----

    def begin(self, command: wire.BeginMove) -> None:
        """Answer how far it is."""
        req = self._agent.find(command.rid)
        obstacle = self._obstacle(req)
        if obstacle is not None:
            self._agent.refuse_move(command.nonce, *obstacle)
            return
        assert req is not None
        computed = req.seqlen - 1 if req.kv.holds_kv else 0
        self._agent.answer(
            wire.Begun,
            command.nonce,
            tokens=pack_tokens((req.origin_input_ids + req.output_ids)[:computed]),
            growth_max=req.sampling_params.max_new_tokens - len(req.output_ids),
            generation=req.retraction_count,
        )

    def send(self, command: wire.SendDelta) -> None:
        """Have tokens copied while it goes on."""
        req = self._agent.find(command.rid)
        obstacle = self._obstacle(req) or self._loss(req, command.generation)
        if obstacle is not None:
            self._agent.refuse_move(command.nonce, *obstacle)
            return
        assert req is not None
        span = command.start, max(command.start, min(req.seqlen - 1, command.end_max))
        copy, round_ = self._copy(req, command, span)
        self._sending.append(_Sending(req, command, copy, round_))

    def freeze(self, command: wire.Freeze) -> None:
        """Have it taken out at a boundary."""
        req = self._agent.find(command.rid)
        obstacle = self._obstacle(req)
        if obstacle is not None:
            self._agent.refuse_move(command.nonce, *obstacle)
        else:
            self._leaving[command.rid] = _Leaving(req, command)

    def release(self, command: wire.Release) -> None:
        """It runs elsewhere; its KV stays as a cached prefix."""
        leaving = self._leaving.get(command.rid)
        if leaving is not None and leaving.frozen:
            self._drop(leaving.req)
            self._agent.forget(leaving.req)
            self._agent.report_load()
        self._agent.answer(wire.Done, command.nonce)

    def resume(self, command: wire.Resume) -> None:
        """It goes on."""
        given_up = [sending for sending in self._sending if sending.command.rid == command.rid]
        self._sending = [sending for sending in self._sending if sending.command.rid != command.rid]
        for sending in given_up:
            sending.copy.given_up = True
            self._agent.refuse_move(sending.command.nonce, Refusal.UNKNOWN, "the move was given up")
        leaving = self._leaving.get(command.rid)
        if leaving is not None and not leaving.frozen:
            leaving.given_up = True
        elif leaving is not None:
            self._restore(leaving)
        self._agent.answer(wire.Done, command.nonce)

    def cancel(self, req: Any) -> bool:
        """End a frozen request for its client; False if it isn't frozen."""
        leaving = self._leaving.get(req.rid)
        if leaving is None or not leaving.frozen:
            return False
        self._drop(req)
        self._agent.record_abort(req, None)
        return True

    def break_off(self, reason: str) -> None:
        """No round that is under way can be carried on; what is frozen stays so."""
        rounds, self._sending = self._sending, []
        for sending in rounds:
            sending.copy.given_up = True
            self._agent.refuse_move(sending.command.nonce, Refusal.BROKEN, reason)

    # ---- at a step boundary ----

    def act(self) -> None:
        """See how far each round is, and freeze who can be frozen."""
        waiting, self._sending = self._sending, []
        self._sending = [sending for sending in waiting if not self._is_sent(sending)]
        for leaving in [leaving for leaving in self._leaving.values() if not leaving.frozen]:
            self._try_freeze(leaving)

    def _is_sent(self, sending: _Sending) -> bool:
        """Whether all of a round is gathered, or nobody wants it. The request is looked at after the copy: as long as
        it has its pages, and has never lost them, what was read of them was its."""
        command, copy = sending.command, sending.copy
        gathered = copy.go_on()
        obstacle = self._obstacle(sending.req) or self._loss(sending.req, command.generation)
        if obstacle is not None:
            copy.given_up = True
            self._agent.refuse_move(command.nonce, *obstacle)
        elif gathered:
            self._agent.answer(
                wire.Gathered, command.nonce, start=copy.start, end=copy.end, byte_count=sending.round.byte_count
            )
        return gathered or obstacle is not None

    def _copy(self, req: Any, command: wire.SendDelta | wire.Freeze, span: tuple[int, int]) -> tuple[Copy, Round]:
        """A round, begun."""
        copy = Copy(command.targets, self._agent.rank, command.generation, span)
        round_ = Round(command.sent_nonce, command.timeout_s)
        copy.begin(row_reader(self._kv, self._scheduler, req, *span), self._data, round_)
        return copy, round_

    def _try_freeze(self, leaving: _Leaving) -> None:
        req, command = leaving.req, leaving.command
        obstacle = self._obstacle(req)
        if obstacle is None and command.copies:
            obstacle = self._loss(req, command.generation) or self._overflow(req, command)
        if obstacle is None and leaving.given_up:
            obstacle = Refusal.UNKNOWN, "the move was given up"
        if obstacle is not None:
            self._restore(leaving)
            self._agent.refuse_move(command.nonce, *obstacle)
        elif not req.kv.holds_kv:
            self._leave_queue(req)
            self._finish_freeze(leaving)
        elif self._leave_batches(leaving):
            self._finish_freeze(leaving)

    def _leave_batches(self, leaving: _Leaving) -> bool:
        """Whether it is out, and nothing with it is launched."""
        if not leaving.outside and self._batches.can_leave(leaving.req):
            self._batches.remove(leaving.req)
            leaving.outside = True
        return leaving.outside and not self._batches.is_launched(leaving.req)

    def _leave_queue(self, req: Any) -> None:
        scheduler = self._scheduler
        scheduler.waiting_queue = [waiting for waiting in scheduler.waiting_queue if waiting is not req]
        scheduler.tree_cache.finish(req.cache_request_handle, CacheRequestOutcome.ABORT)

    def _finish_freeze(self, leaving: _Leaving) -> None:
        req, command = leaving.req, leaving.command
        leaving.frozen = True
        frozen_ns = time.time_ns()
        if req.kv.holds_kv:
            frozen_ns -= time.monotonic_ns() - self._agent.step_ended_ns
        self._agent.flush_tokens(req)
        start, end, byte_count, hashes = command.start, 0, 0, list[wire.PairHash]()
        if command.copies:
            end = max(start, req.seqlen - 1)
            copy, round_ = self._copy(req, command, (start, end))
            copy.finish()
            byte_count = round_.byte_count
            hashes = self._hashes(req, command, end)
        self._agent.answer(
            wire.FrozenAt,
            command.nonce,
            start=start,
            end=end,
            byte_count=byte_count,
            output=pack_tokens(req.output_ids),
            state=_state(req),
            hashes=hashes,
            frozen_ns=frozen_ns,
        )

    def _hashes(self, req: Any, command: wire.Freeze, end: int) -> list[wire.PairHash]:
        if command.hash_start < 0:
            return []
        parts = [target.part for target in command.targets if target.part.rank == self._agent.rank]
        return row_reader(self._kv, self._scheduler, req).hashes(parts, command.hash_start, end)

    # ---- what it may be ----

    def _obstacle(self, req: Any) -> Obstacle | None:
        """Why it can't leave now."""
        if req is None or req.finished() or req.to_finish is not None:
            return Refusal.UNKNOWN, "the request has ended"
        if req.rid in self._leaving and self._leaving[req.rid].frozen:
            return Refusal.BUSY, "the request is frozen"
        if req in self._batches.entering:
            return Refusal.BUSY, "the request is on its way into a batch"
        if self._scheduler.kv_capacity.is_preempting(req):
            return Refusal.BUSY, "the request is being preempted"
        if req in self._scheduler.grammar_manager.grammar_queue:
            return Refusal.BUSY, "its schema is being compiled"
        if req.kv.holds_kv and (self._batches.is_in_prefill(req) or not req.output_ids):
            return Refusal.BUSY, "its prefill is under way"
        return None

    @staticmethod
    def _loss(req: Any, generation: int) -> Obstacle | None:
        """Why what was copied of it counts for nothing."""
        if req.retraction_count != generation or not req.kv.holds_kv:
            return Refusal.PREEMPTED, "the request was preempted"
        return None

    @staticmethod
    def _overflow(req: Any, command: wire.Freeze) -> Obstacle | None:
        if req.seqlen - 1 > command.end_max:
            return Refusal.NO_ROOM, f"{req.seqlen - 1} tokens for {command.end_max} slots"
        return None

    # ---- what becomes of it ----

    def _restore(self, leaving: _Leaving) -> None:
        """It goes on as before."""
        req = leaving.req
        del self._leaving[req.rid]
        if req.finished():
            return
        if leaving.outside:
            self._batches.enter(req)
        elif leaving.frozen:
            self._scheduler.requeue(req)

    def _drop(self, req: Any) -> None:
        """Free its memory, without a word to the client."""
        del self._leaving[req.rid]
        req.finished_reason = FINISH_ABORT("moved")
        req.finished_len = len(req.output_ids)
        req.finished_output = True
        if req.kv.holds_kv:
            release_kv_cache(req, self._scheduler.tree_cache, checkpoint=True)
        req.time_stats.set_completion_time()


def _state(req: Any) -> wire.MovedState:
    return wire.MovedState(
        version=wire.STATE_VERSION,
        seed=req.sampling_params.sampling_seed,
        cached_tokens=req.cached_tokens,
        preemptions=req.retraction_count,
        preemption_loss_ns=req.mesh.preemption_loss_ns,
        waits_ns=req.mesh.preempted_ns and time.monotonic_ns() - req.mesh.preempted_ns,
    )
