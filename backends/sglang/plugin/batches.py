"""SGLang's batches at a step boundary: requests that leave them, and requests that enter with their KV.

At `get_next_batch_to_run` of micro-batch `m` all results of `m` are processed on this rank, and every other
micro-batch is launched and not processed. So a request may leave only when no other micro-batch has it, and enters
only its own micro-batch, at that one's turn. One stage without overlap has one micro-batch and nothing launched.
"""

import time
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.runtime_context import get_parallel

OnEntry = Callable[[int], None]
"""Gets the Unix time in nanoseconds from which it may be stepped."""


def _nobody(_: int) -> None:
    """Nobody is to be told."""


class Batches:
    """The batches of one rank. All ranks take the same decisions at the same iteration."""

    def __init__(self, scheduler: Any, iteration: Callable[[], int]) -> None:
        self._scheduler = scheduler
        self._iteration = iteration
        self._entering: list[tuple[int, Any, OnEntry]] = []
        """(micro-batch, a batch of one, whom to tell)."""

    def __len__(self) -> int:
        return len(self._entering)

    @property
    def entering(self) -> list[Any]:
        """Requests on their way into a batch."""
        return [req for _, batch, _ in self._entering for req in batch.reqs]

    def running(self) -> list[Any]:
        """The batches that requests are in between two steps, in the same order on all ranks."""
        scheduler = self._scheduler
        batches = [scheduler.running_batch, scheduler.last_batch]
        if get_parallel().pp_size > 1:
            batches = [*scheduler.running_mbs, *scheduler.last_mbs, *batches]
        return list({id(batch): batch for batch in batches if batch is not None}.values())

    def is_launched(self, req: Any) -> bool:
        """Whether a step with it is launched and not processed."""
        return any(req in batch.reqs for batch in self._launched())

    def is_in_prefill(self, req: Any) -> bool:
        """Whether its prefill is launched, or between two chunks."""
        if req is self._scheduler.chunked_req or req.inflight_middle_chunks > 0:
            return True
        return any(req in batch.reqs and batch.forward_mode.is_extend() for batch in self._launched())

    def can_leave(self, req: Any) -> bool:
        """Whether `remove` may be called now."""
        return get_parallel().pp_size == 1 or not self.is_launched(req)

    def remove(self, req: Any) -> None:
        """Take it out of the batches. What the overlap scheduler has launched goes on, on a copy of its batch: the
        request is free at the next boundary only."""
        for batch in self.running():
            if req in batch.reqs:
                batch.filter_batch(reqs_to_exclude=[req])
                batch.batch_is_full = False

    def enter(self, req: Any, on_entry: OnEntry = _nobody) -> None:
        """Step a request on that has a row with the KV of all its tokens but the last: no forward pass."""
        scheduler = self._scheduler
        req.refresh_fill_ids()
        req.extend_end = req.already_computed = req.seqlen - 1
        req.prefix_len = min(req.prefix_len, req.extend_end)
        batch = ScheduleBatch.init_new(
            [req],
            scheduler.req_to_token_pool,
            scheduler.token_to_kv_pool_allocator,
            scheduler.tree_cache,
            scheduler.model_config,
            scheduler.enable_overlap,
            scheduler.spec_algorithm,
        )
        batch.prepare_for_prebuilt()
        if scheduler.enable_overlap:
            # The launched step may still write rows that are read here.
            scheduler.schedule_stream.wait_stream(scheduler.forward_stream)
        batch.process_prebuilt(scheduler.future_map)
        self._entering.append((self._choose_micro_batch(), batch, on_entry))

    def merge_into(self, running_batch: Any) -> Any:
        """The running batch of this micro-batch with those that enter it now."""
        waiting, self._entering = self._entering, []
        for entry in waiting:
            target, batch, on_entry = entry
            is_full = len(running_batch.reqs) >= get_parallel().pp_max_micro_batch_size
            if target != self._micro_batch():
                self._entering.append(entry)
                continue
            # One that has to wait for a place has arrived nevertheless.
            on_entry(time.time_ns())
            if is_full:
                self._entering.append((target, batch, _nobody))
            elif running_batch.is_empty():
                running_batch = batch
            else:
                running_batch.merge_batch(batch)
        return running_batch

    def _launched(self) -> list[Any]:
        scheduler = self._scheduler
        if get_parallel().pp_size > 1:
            current = self._micro_batch()
            return [batch for index, batch in enumerate(scheduler.mbs) if index != current and batch is not None]
        return [batch for batch, _ in getattr(scheduler, "result_queue", None) or ()]

    def _micro_batch(self) -> int:
        return self._iteration() % self._loop_size()

    def _loop_size(self) -> int:
        return int(getattr(self._scheduler, "pp_loop_size", 1))

    def _choose_micro_batch(self) -> int:
        """The emptiest; of equal ones that whose turn comes first. The same on all ranks."""
        if get_parallel().pp_size == 1:
            return 0
        scheduler = self._scheduler
        loads = [len(batch.reqs) for batch in scheduler.running_mbs]
        for index, batch in enumerate(scheduler.mbs):
            is_prefill = batch is not None and batch is not scheduler.running_mbs[index]
            if is_prefill and batch.forward_mode.is_extend():
                loads[index] += len(batch.reqs)
        for target, batch, _ in self._entering:
            loads[target] += len(batch.reqs)
        turns = [(self._micro_batch() + turn) % self._loop_size() for turn in range(self._loop_size())]
        return min(turns, key=loads.__getitem__)
