"""A rank's part of changes of layers: acts on the worker's commands, and at the seams of the scheduler's loop.

Handlers note what is to be done at the step boundary that follows; there all ranks are at one point of the stream. How
a change goes is in `table`; why a stage that has got layers doesn't wait for what their old owner is still computing,
in `scheduled`."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from meshift.backends.sglang import wire_layers as wire
from meshift.backends.sglang.plugin.data_plane import DataPlane
from meshift.backends.sglang.plugin.kv import RankKv
from meshift.backends.sglang.plugin.layers.change import Change, clean_after_abort, clean_after_switch
from meshift.backends.sglang.plugin.layers.copying import LayerCopy
from meshift.backends.sglang.plugin.layers.facts import describe_layers, make_weights
from meshift.backends.sglang.plugin.layers.loading import Loading
from meshift.backends.sglang.plugin.layers.preparing import Preparation
from meshift.backends.sglang.plugin.layers.receiving import wait_until_applied
from meshift.backends.sglang.plugin.layers.scheduled import Scheduled
from meshift.backends.sglang.plugin.layers.table import ChangeEvent, ChangeState
from meshift.schemas.layouts import LayoutRefusal

if TYPE_CHECKING:
    from meshift.backends.sglang.plugin.agent import RankAgent

LAST_PATCH_TIMEOUT_S = 20.0
"""Until KV that was written elsewhere before a lagging commit must have come; the rank can't go on without."""

CHUNK_WAIT_BOUNDARIES_MAX = 200
"""A lagging commit waits that long for a prompt whose chunks follow one another, for they would have to wait."""

Drained = (ChangeState.DRAINING, ChangeState.DRAINED)


class RankLayers:
    """One per scheduler."""

    def __init__(self, scheduler: Any, agent: "RankAgent", kv: RankKv, data: DataPlane) -> None:
        self._scheduler = scheduler
        self._agent = agent
        self._kv = kv
        self._data = data
        self._weights = make_weights(scheduler)
        self._change: Change | None = None
        self._lag_waits = 0
        self._lag_from: int | None = None
        """The old layout's last iteration."""
        self.scheduled = Scheduled()
        self._preparation = Preparation(scheduler, agent, kv, data, self.scheduled)
        kv.on_written = self.scheduled.add

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """What SGLang's dispatcher calls for each command."""
        return {
            wire.BeginLayers: self._begin,
            wire.LoadLayers: self._with_change(self._load),
            wire.OpenLayers: self._with_change(self._preparation.open),
            wire.SendLayers: self._with_change(self._preparation.send),
            wire.AskLayers: self._with_change(self._preparation.tell),
            wire.DrainLayers: self._with_change(self._drain),
            wire.FlushLayers: self._with_change(self._flush),
            wire.SwitchLayers: self._with_change(self._order_switch),
            wire.CommitLayers: self._with_change(self._lag),
            wire.AbortLayers: self._abort,
            wire.ExpireLayers: self._expire,
        }

    @property
    def is_idle(self) -> bool:
        """Whether the scheduler's loop may sleep, as far as this is concerned."""
        return self._change is None or self._change.state is ChangeState.OPEN

    def describe(self) -> wire.LayerFacts:
        """For the worker, at the start."""
        return describe_layers(self._scheduler, self._weights)

    # ---- commands ----

    def _with_change(self, act: Callable[[Change, Any], None]) -> Callable[[Any], None]:
        def handle(command: Any) -> None:
            change = self._change
            if change is None or change.change_id != command.change_id or change.state is ChangeState.ABORTING:
                self._refuse(command.nonce, LayoutRefusal.UNKNOWN, f"no change {command.change_id}")
            else:
                act(change, command)

        return handle

    def _refuse(self, nonce: int, refusal: LayoutRefusal, message: str) -> None:
        self._agent.answer(wire.LayersRefused, nonce, refusal=refusal.value, message=message)

    def _done(self, nonce: int, **fields: Any) -> None:
        self._agent.answer(wire.LayersDone, nonce, **fields)

    def _begin(self, command: wire.BeginLayers) -> None:
        if self._change is not None:
            self._refuse(command.nonce, LayoutRefusal.BUSY, f"change {self._change.change_id} is under way")
            return
        if self._weights is None:
            self._refuse(command.nonce, LayoutRefusal.UNSUPPORTED, "layers can't move")
            return
        share = self._kv.share
        current, target = (share.layer_start, share.layer_end), command.target[self._scheduler.pp_group.rank_in_group]
        gained = [layer for layer in range(*target) if layer not in range(*current)]
        deadline_s = time.monotonic() + command.deadline_s
        self._change = Change(command, current, target, Loading(self._weights, gained, target), deadline_s)
        self._scheduler.kv_capacity.growth_obstacle = "layers move"
        self._done(command.nonce)

    def _load(self, change: Change, command: wire.LoadLayers) -> None:
        change.loading.start()
        self._done(command.nonce)

    def _drain(self, change: Change, command: wire.DrainLayers) -> None:
        change.move(ChangeEvent.DRAIN)
        # As many boundaries later all results are processed, here; the worker waits for all ranks.
        change.drain_left = self._loop_size
        change.drain_nonce = command.nonce

    def _flush(self, change: Change, command: wire.FlushLayers) -> None:
        if change.copy is not None:
            change.copy.finish()
        change.final_watermark = self.scheduled.tokens
        change.flush_nonce = command.nonce

    def _order_switch(self, change: Change, command: wire.SwitchLayers) -> None:
        if command.goes:
            change.switch = command.nonce, command.settled_nonce
            return
        change.move(ChangeEvent.ROLL_BACK)
        change.problem = change.trouble() or "its commit was taken back"
        change.drain_nonce = change.flush_nonce = None
        self._done(command.nonce)

    def _lag(self, change: Change, command: wire.CommitLayers) -> None:
        change.move(ChangeEvent.LAG)
        change.switch = command.nonce, command.settled_nonce
        self._lag_from, self._lag_waits = None, 0

    def _abort(self, command: wire.AbortLayers) -> None:
        change = self._change
        if change is None or change.change_id != command.change_id:
            self._done(command.nonce)
        elif change.state is ChangeState.OPEN:
            change.end_nonces.append(command.nonce)
            self._undo(change, ChangeEvent.ABORT)
        elif change.state is ChangeState.ABORTING:
            change.end_nonces.append(command.nonce)
        else:
            self._refuse(command.nonce, LayoutRefusal.BUSY, "it is being committed")

    # ---- the deadline ----

    def due_commands(self) -> list[Any]:
        """The leading rank's: what it puts into the stream by itself."""
        change = self._change
        if change is None or change.expiring or change.state is not ChangeState.OPEN:
            return []
        if time.monotonic() < change.deadline_s:
            return []
        change.expiring = True
        return [wire.ExpireLayers(change_id=change.change_id)]

    def _expire(self, command: wire.ExpireLayers) -> None:
        change = self._change
        if change is not None and change.change_id == command.change_id and change.state is ChangeState.OPEN:
            change.expired = True
            self._undo(change, ChangeEvent.EXPIRE)

    def _undo(self, change: Change, event: ChangeEvent) -> None:
        change.move(event)
        # Who still writes keeps that memory until he is quiet.
        self._pool.unstage_layers()
        self._scheduler.kv_capacity.growth_obstacle = ""
        clean_after_abort(change, self._data)

    # ---- seams of the scheduler's loop ----

    def holds_back(self, can_step: bool) -> bool:
        """At a boundary: whether nothing may be launched now. `can_step`: whether there is something to launch."""
        self.scheduled.note_boundary(self._loop_size)
        change = self._change
        if change is None:
            return False
        self._advance(change)
        holds = change.state in Drained
        if holds and can_step:
            change.held.hold()
        elif not holds:
            change.held.let_go()
        self._answer_switch(change)
        return holds

    def before_launch(self, batch: Any) -> None:
        """A step is about to be launched: wait for KV that it reads and that is still on its way."""
        change = self._change
        if change is None or batch is None or change.state is not ChangeState.SWITCHED or not change.receivers:
            return
        watermark = self.scheduled.read_by(batch)
        if all(receiver.applied >= watermark for receiver in change.receivers):
            return
        change.held.hold()
        if not wait_until_applied(change.receivers, watermark, change.arrived, LAST_PATCH_TIMEOUT_S):
            raise RuntimeError(f"KV of {change.change_id} didn't come: {change.trouble() or 'no answer'}")
        change.held.let_go()

    def after_launch(self, tokens: int) -> None:
        """A step was launched that writes the KV of so many tokens."""
        self.scheduled.add(tokens)
        change = self._change
        if change is None or change.copy is None:
            return
        if self._lag_from == self._agent.iteration:
            change.held.hold()
            change.copy.finish()
            change.held.let_go()
        else:
            change.copy.note()

    # ---- what goes on by itself ----

    def _advance(self, change: Change) -> None:
        match change.state:
            case ChangeState.DRAINING:
                self._drain_on(change)
            case ChangeState.DRAINED:
                self._finish_drain(change)
            case ChangeState.LAGGING:
                self._lag_on(change)
            case ChangeState.SWITCHED | ChangeState.ABORTING:
                self._settle(change)

    def _drain_on(self, change: Change) -> None:
        if change.copy is not None:
            # Whatever this rank has launched is written.
            change.copy.finish()
        if change.drain_left:
            change.drain_left -= 1
            return
        change.move(ChangeEvent.EMPTY)
        change.final_watermark = self.scheduled.tokens
        self._finish_drain(change)

    def _finish_drain(self, change: Change) -> None:
        """Nothing is launched: say so, once nothing lags either."""
        copies = change.copy is not None or bool(change.receivers)
        flushed = change.is_flushed or not copies
        for name in ("drain_nonce", "flush_nonce"):
            nonce = getattr(change, name)
            if nonce is not None and (flushed or change.trouble()):
                setattr(change, name, None)
                tokens, byte_count = _lagged(change.copy)
                self._done(nonce, problem=change.trouble(), tokens=tokens, byte_count=byte_count)
        if change.switch is not None:
            self._switch(change)

    def _lag_on(self, change: Change) -> None:
        if self._lag_from is not None:
            if change.copy is not None:
                # There was nothing to launch in that iteration.
                change.copy.finish()
            change.final_watermark = self.scheduled.tokens
            change.held.hold()
            self._switch(change)
            change.held.let_go()
            return
        self._lag_waits += 1
        if self._scheduler.chunked_req is None or self._lag_waits > CHUNK_WAIT_BOUNDARIES_MAX:
            self._lag_from = self._agent.iteration

    def _switch(self, change: Change) -> None:
        if change.command.verify and change.state is ChangeState.DRAINED:
            change.hashes = self._preparation.hashes(change)
        begun_ns = time.monotonic_ns()
        assert self._weights is not None
        start, end = change.target
        change.dropped = self._pool.commit_layers(start, end)
        self._weights.switch(start, end, change.loading.listed)
        runner = self._scheduler.tp_worker.model_runner
        runner.layer_info = msgspec.structs.replace(
            runner.layer_info, start_layer=start, end_layer=end, num_effective_layers=end - start
        )
        if hasattr(runner.attn_backend, "forget_layers"):
            runner.attn_backend.forget_layers()
        self._kv.share = msgspec.structs.replace(self._kv.share, layer_start=start, layer_end=end)
        self._scheduler.kv_capacity.growth_obstacle = ""
        self._agent.moves_out.break_off("the layers of its stages have changed")
        self._lag_from = None
        change.move(ChangeEvent.SWITCH)
        change.switched_at = self._agent.iteration
        change.switch_ns = time.monotonic_ns() - begun_ns

    def _answer_switch(self, change: Change) -> None:
        """Once nothing lags."""
        if change.state is not ChangeState.SWITCHED or change.switch is None:
            return
        if change.trouble():
            raise RuntimeError(f"layers have moved and their KV hasn't: {change.trouble()}")
        if not change.is_flushed and (change.copy is not None or change.receivers):
            return
        (nonce, settled_nonce), change.switch = change.switch, None
        tokens, byte_count = _lagged(change.copy)
        self._agent.answer(
            wire.LayersSwitched,
            nonce,
            switched_at=change.switched_at,
            stop_ns=change.held.longest_ns,
            switch_ns=change.switch_ns,
            tokens=tokens,
            byte_count=byte_count,
            hashes=change.hashes,
        )
        change.end_nonces.append(settled_nonce)
        assert self._weights is not None
        clean_after_switch(change, self._weights, self._data)

    def _settle(self, change: Change) -> None:
        """Its memory is free: it has ended."""
        if change.cleaner is None or change.cleaner.is_alive():
            return
        change.move(ChangeEvent.SETTLE)
        self._change = None
        for nonce in change.end_nonces:
            self._done(nonce)
        if change.expired:
            self._agent.tell(wire.LayersExpired(rank=self._agent.rank, change_id=change.change_id))

    # ---- SGLang's ----

    @property
    def _pool(self) -> Any:
        return self._scheduler.token_to_kv_pool_allocator.get_kvcache()

    @property
    def _loop_size(self) -> int:
        return int(getattr(self._scheduler, "pp_loop_size", 1))


def _lagged(copy: LayerCopy | None) -> tuple[int, int]:
    pairs = copy.pairs if copy is not None else ()
    return max((pair.last_tokens for pair in pairs), default=0), sum(pair.last_bytes for pair in pairs)
