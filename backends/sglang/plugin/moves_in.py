"""A rank's part of moves to here: reservations, and their end as running requests or as free memory."""

import time
from typing import TYPE_CHECKING, Any

import torch

from meshift.backends.base import Refusal
from meshift.backends.sglang import wire as commands
from meshift.backends.sglang import wire_moves as wire
from meshift.backends.sglang.pairs import to_wire
from meshift.backends.sglang.plugin import grammar, requests
from meshift.backends.sglang.plugin.batches import Batches
from meshift.backends.sglang.plugin.data_plane import DataPlane
from meshift.backends.sglang.plugin.kv import RankKv
from meshift.backends.sglang.plugin.receiving import Receiver, Reservation
from meshift.backends.sglang.plugin.reservations import Reservations
from meshift.schemas.base import unpack_tokens

if TYPE_CHECKING:
    from meshift.backends.sglang.plugin.agent import RankAgent


class MovesIn:
    """The requests of one rank that arrive."""

    def __init__(self, scheduler: Any, agent: "RankAgent", batches: Batches, kv: RankKv, data: DataPlane) -> None:
        self._scheduler = scheduler
        self._agent = agent
        self._batches = batches
        self._kv = kv
        self._data = data
        self.reservations = Reservations(scheduler)
        self._arriving: dict[str, commands.Commit] = {}
        """Commits whose request SGLang is building."""

    # ---- commands ----

    def reserve(self, command: wire.Reserve) -> None:
        """Promise room."""
        reservation = self.reservations.reserve(command.rid, unpack_tokens(command.tokens), command.slots)
        if reservation is None:
            free = self._scheduler.token_to_kv_pool_allocator.available_size()
            self._agent.refuse_move(command.nonce, Refusal.NO_ROOM, f"{command.slots} slots wanted, {free} free")
            return
        self._agent.report_load()
        self._agent.answer(
            wire.ReservedAt,
            command.nonce,
            cached=reservation.cached,
            slots=reservation.end,
            targets=self._open_transfers(command, reservation),
        )

    def hash_reserved(self, command: wire.HashReserved) -> None:
        """Answer what lies in the slots."""
        reservation = self.reservations.get(command.rid)
        hashes = []
        if reservation is not None:
            parts = [receiver.part for receiver in reservation.receivers]
            hashes = reservation.reader(self._kv).hashes(parts, command.start, command.end)
        self._agent.answer(wire.Hashes, command.nonce, hashes=hashes)

    def quiesce(self, command: wire.Quiesce) -> None:
        """First half of an abort: no writer is left when all ranks are quiet."""
        reservation = self.reservations.get(command.rid)
        receivers = [] if reservation is None else reservation.receivers
        self._data.report_when_quiet(command.nonce, [receiver.part.transfer_id for receiver in receivers])

    def unreserve(self, command: wire.Unreserve) -> None:
        """Second half: the memory is free."""
        self.reservations.free(command.rid)
        self._agent.report_load()
        self._agent.answer(wire.Done, command.nonce)

    def commit(self, command: commands.Commit) -> None:
        """Let SGLang build the request; `arrive` gets it, at once or when its schema is compiled."""
        rid, scheduler = command.submit.rid, self._scheduler
        obstacle = self._missing(command)
        if obstacle is not None:
            self._agent.refuse_move(command.nonce, *obstacle)
            return
        try:
            received = requests.to_sglang(command.submit, scheduler.tokenizer, scheduler.model_config.vocab_size)
        except ValueError as error:
            self._agent.refuse_move(command.nonce, Refusal.INCOMPATIBLE, str(error))
            return
        self._arriving[rid] = command
        scheduler.handle_generate_request(received)
        if not command.computed:
            self._answer_commit(command.nonce, time.time_ns())

    def recall(self, command: wire.Recall) -> None:
        """Give up a commit that waits for a schema."""
        req = self._agent.find(command.rid)
        if req is not None and command.rid in self._arriving and self._arriving[command.rid].computed:
            queue = self._scheduler.grammar_manager.grammar_queue
            queue[:] = [waiting for waiting in queue if waiting is not req]
            self._refuse_arrival(req, Refusal.BROKEN, "its schema was not compiled in time")

    # ---- arrival ----

    def arrives(self, req: Any) -> bool:
        """Whether a request that is about to be queued has moved here with its KV; if so, it enters a batch."""
        command = self._arriving.get(req.rid)
        if command is None:
            return False
        self._restore(req, command.state)
        if not command.computed:
            del self._arriving[req.rid]
            return False
        if req.to_finish is None:
            grammar.replay_output(req)
        if req.finished() or req.to_finish is not None:
            reason = (req.finished_reason or req.to_finish).to_json()
            self._refuse_arrival(req, Refusal.INCOMPATIBLE, str(reason.get("message")))
        elif self._scheduler.req_to_token_pool.available_size() <= 0:
            self._refuse_arrival(req, Refusal.NO_ROOM, "as many requests as there may be")
        else:
            del self._arriving[req.rid]
            self._settle(req, command.computed)
            self._batches.enter(req, lambda runnable_ns: self._answer_commit(command.nonce, runnable_ns))
        return True

    def _answer_commit(self, nonce: int, runnable_ns: int) -> None:
        self._agent.report_load()
        self._agent.answer(wire.CommittedAt, nonce, runnable_ns=runnable_ns)

    def _missing(self, command: commands.Commit) -> tuple[Refusal, str] | None:
        if not command.computed:
            return None
        reservation = self.reservations.get(command.submit.rid)
        if reservation is None:
            return Refusal.UNKNOWN, "no such reservation"
        if not reservation.cached <= command.computed <= reservation.end:
            return Refusal.NO_ROOM, f"{command.computed} tokens in {reservation.end} slots"
        return None

    def _refuse_arrival(self, req: Any, refusal: Refusal, message: str) -> None:
        """The reservation stays."""
        command = self._arriving.pop(req.rid)
        self._scheduler._release_aborted_request(req)
        self._agent.forget(req)
        self._agent.refuse_move(command.nonce, refusal, message)

    @staticmethod
    def _restore(req: Any, state: wire.MovedState) -> None:
        """What isn't in its `Submit`."""
        req.logprob_start_len = -1
        req.input_logprob_sent = True
        req.cached_tokens = state.cached_tokens
        req._cache_breakdown_computed = True
        req.retraction_count = state.preemptions
        req.retracted_stain = state.preemptions > 0
        req.mesh.preemption_loss_ns = state.preemption_loss_ns
        if state.waits_ns is not None:
            req.mesh.preempted_ns = time.monotonic_ns() - state.waits_ns

    def _settle(self, req: Any, computed: int) -> None:
        """Turn its reservation into its row."""
        reservation = self.reservations.take(req.rid)
        self._close_transfers(reservation)
        self._kv.mark_written(reservation.slots)
        scheduler, tree, cached = self._scheduler, self._scheduler.tree_cache, reservation.cached
        used = -(-computed // scheduler.page_size) * scheduler.page_size - cached
        if used < len(reservation.slots):
            scheduler.token_to_kv_pool_allocator.free(reservation.slots[used:])
        scheduler.req_to_token_pool.alloc([req])
        row, write = req.kv.req_pool_idx, scheduler.req_to_token_pool.write
        if cached:
            write((row, slice(0, cached)), tree.path_device_indices(reservation.node)[:cached].to(torch.int32))
        if computed > cached:
            write((row, slice(cached, computed)), reservation.slots[: computed - cached].to(torch.int32))
        req.kv.kv_allocated_len = req.kv.kv_committed_len = computed
        req.kv.cache_protected_len = req.prefix_len = cached
        req.last_node = reservation.node if reservation.node is not None else tree.root_node_handle(req.extra_key)
        req.lock = reservation.lock

    # ---- transfers ----

    def _open_transfers(self, command: wire.Reserve, reservation: Reservation) -> list[tuple[int, wire.TargetAddress]]:
        def tell(pair: int, tokens: int) -> None:
            self._data.report(wire.Applied(rank=self._agent.rank, rid=command.rid, pair=pair, tokens=tokens))

        opened = []
        for part in command.parts:
            if part.rank == self._agent.rank:
                receiver = Receiver(part, reservation, self._kv, tell)
                reservation.receivers.append(receiver)
                address = self._data.open_transfer(part.transfer_id, receiver.apply)
                opened.append((part.pair, to_wire(address)))
        return opened

    def _close_transfers(self, reservation: Reservation) -> None:
        for receiver in reservation.receivers:
            self._data.close_transfer(receiver.part.transfer_id)
