"""SGLang's scheduler with our agent in it. Overrides only pass on; decisions are in `agent`."""

import contextlib
import os
from typing import Any

from sglang.srt.managers.load_snapshot import shm_path_for
from sglang.srt.managers.schedule_batch import NextBatchPlan
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

from meshift.backends.sglang.arguments import COMPUTE_NICENESS
from meshift.backends.sglang.plugin import context, grammar
from meshift.backends.sglang.plugin.activate import CAPACITY_VARIABLE
from meshift.backends.sglang.plugin.agent import RankAgent
from meshift.backends.sglang.plugin.capacity import REQUEST_SLACK_TOKENS, KvCapacity
from meshift.backends.sglang.plugin.data_plane import DataPlane
from meshift.backends.sglang.plugin.kv import describe


class MeshScheduler(Scheduler):  # type: ignore[misc]
    """The scheduler of a rank of a meshift worker."""

    # ---- construction ----

    def init_ipc_channels(self, port_args: Any) -> None:
        super().init_ipc_channels(port_args)
        self._drop_load_snapshot(port_args)
        here = context.current()
        self.agent = RankAgent(self, here)
        self.data_plane = DataPlane(
            here.rank,
            here.data_host,
            lambda: context.Outbox(here.reports_address),
            here.data_transport,
            here.data_bytes_per_s,
        )
        self.data_plane.start()
        # The sockets' threads exist now, the computing ones don't yet: only those are born with this.
        os.setpriority(os.PRIO_PROCESS, 0, COMPUTE_NICENESS)

    def _drop_load_snapshot(self, port_args: Any) -> None:
        """SGLang's own load file in /dev/shm has no reader here, and would outlive a killed rank."""
        writer: Any = self.load_snapshot_writer
        self.load_snapshot_writer: Any = None
        if writer is not None:
            writer.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(shm_path_for(port_args.instance_id))

    def init_model_worker(self) -> None:
        super().init_model_worker()
        # One rule for the worker to check: prompt plus output against `request_tokens_max`.
        self.max_req_input_len = self.max_req_len

    def init_request_dispatcher(self) -> None:
        super().init_request_dispatcher()
        self.agent.start_moving(self.data_plane)
        self._request_dispatcher._mapping.update(self.agent.handlers())

    def init_grammar_manager(self) -> None:
        grammar.register_backend()
        super().init_grammar_manager()
        grammar.bound_compilations(self.grammar_manager)

    def get_output_streamer_class(self) -> type:
        agent = self.agent

        class StepStreamer(SchedulerOutputStreamer):  # type: ignore[misc]
            """Hands each step's requests to the agent instead of to a detokenizer process."""

            def stream_output(self, reqs: Any, return_logprob: bool, skip_req: Any = None) -> None:
                agent.collect(reqs, skip_req)

        return StepStreamer

    def request_tokens_max(self) -> int:
        """The longest request (prompt plus output) that is surely admitted when it is alone."""
        by_context = self.model_config.context_len - REQUEST_SLACK_TOKENS
        by_memory = self.max_total_num_tokens - 2 * self.page_size - REQUEST_SLACK_TOKENS
        return int(min(by_context, by_memory))

    def _check_supported(self) -> None:
        """Our accounting, and the moves to come, are written for one plain KV pool of a model that generates."""
        if not self.is_generation or self.is_hybrid_swa or self.is_hybrid_ssm:
            raise NotImplementedError("meshift serves generating models with one plain KV cache only")

    def get_init_info(self) -> dict[str, Any]:
        self._check_supported()
        self.kv_capacity = KvCapacity(self)
        self.kv_capacity.start_with(os.environ.get(CAPACITY_VARIABLE))
        ours = {
            "capacity": self.max_total_num_tokens,
            "page_size": self.page_size,
            "request_tokens_max": self.request_tokens_max(),
            "vocabulary_size": self.model_config.vocab_size,
            "layers": self.model_config.num_hidden_layers,
            "obeys_schemas": self.grammar_manager.grammar_backend is not None,
            "share": describe(self),
            "movable": self.agent.layers.describe(),
        }
        return {**super().get_init_info(), "meshift": ours}

    # ---- the loop ----

    def ingest_requests(self, stop_at_pause: bool = False) -> list[Any]:
        self.agent.begin_iteration()
        received: list[Any] = super().ingest_requests(stop_at_pause)
        self.agent.end_ingest()
        return received

    def _poll_timeout_aborts(self) -> list[Any]:
        return [*super()._poll_timeout_aborts(), *self.agent.layers.due_commands()]

    def get_next_batch_to_run(self, running_batch: Any, last_batch: Any) -> Any:
        running_batch, layers = self.agent.at_boundary(running_batch), self.agent.layers
        can_step = bool(running_batch.reqs or self.waiting_queue or (last_batch and last_batch.reqs))
        if layers.holds_back(can_step):
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        plan = super().get_next_batch_to_run(running_batch=running_batch, last_batch=last_batch)
        layers.before_launch(plan.batch_to_run)
        return plan

    def run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        slots = batch.out_cache_loc
        result = super().run_batch(batch, *args, **kwargs)
        pool = self.token_to_kv_pool_allocator.get_kvcache()
        if hasattr(pool, "after_step"):
            pool.after_step(slots, self.forward_stream if self.enable_overlap else None)
        self.agent.layers.after_launch(0 if slots is None else len(slots))
        return result

    def process_batch_result(self, batch: Any, result: Any) -> None:
        prefilled = batch.extend_num_tokens if batch.forward_mode.is_extend() else 0
        super().process_batch_result(batch, result)
        self.agent.end_step(prefilled)

    def publish_load_snapshot(self, force: bool = False) -> None:
        return None

    def is_fully_idle(self, for_health_check: bool = False, ignore_waiting: bool = False) -> bool:
        idle: bool = super().is_fully_idle(for_health_check, ignore_waiting)
        return idle and self.agent.is_idle

    def on_idle(self) -> None:
        super().on_idle()
        if not self.agent.is_idle and not self.agent.has_work and super().is_fully_idle():
            # Nothing but reservations and frozen requests, for which the next command is awaited.
            self.maybe_sleep_on_idle()

    def maybe_sleep_on_idle(self) -> None:
        """Sleep until a command comes or the loop is to turn again. The leading rank only: later ones wait for it, and
        a sleep of their own would add to its."""
        if self.idle_sleeper is not None:
            self.idle_sleeper.poller.poll(int(self.agent.sleep_s * 1000))

    # ---- requests ----

    def _create_generation_req(self, recv_req: Any, *args: Any, **kwargs: Any) -> Any:
        req = super()._create_generation_req(recv_req, *args, **kwargs)
        self.agent.adopt(req, recv_req)
        return req

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        if not is_retracted and (self.agent.moves_in.arrives(req) or self.agent.ends_on_arrival(req)):
            return
        super()._add_request_to_queue(req, is_retracted)
        if is_retracted:
            self.agent.note_preemption(req)

    def requeue(self, req: Any) -> None:
        """Put a request back into the queue, at its old place."""
        entered = req.time_stats.wait_queue_entry_time
        super()._add_request_to_queue(req)
        req.time_stats.wait_queue_entry_time = entered

    def send_abort_output(self, abort_req: Any, req: Any) -> None:
        self.agent.record_abort(req, abort_req.finished_reason)
