"""The main program of a rank process, forked by `fork_main`, which has called `prepare` before.

Everything of SGLang, imports included, happens there and here, so that the worker's process stays light and responsive.
"""

import faulthandler
import functools
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

from meshift.backends.sglang import wire
from meshift.backends.sglang.plugin.activate import CPU_PLATFORM_VARIABLE
from meshift.backends.sglang.plugin.context import Outbox, RankContext, install
from meshift.backends.sglang.rank_spec import RankSpec

EXIT_FAILED = 1

SWITCH_INTERVAL_S = 0.001
"""Of Python's threads. While a request is between two instances, the data thread must not wait for the step thread."""

_BATCH_LOGGER = "sglang.srt.managers.scheduler_components.metrics_reporter"
"""Writes a line for every prefill; that is what our metrics are for."""

_UNUSED_ADDRESS = "inproc://meshift-unused"
"""For those of SGLang's sockets at whose other end nobody is."""


class ReadyReporter:
    """Stands in for the pipe on which SGLang announces a scheduler that is ready."""

    def __init__(self, context: RankContext) -> None:
        self._context = context

    def send(self, info: dict[str, Any]) -> None:
        self._context.outbox.send(wire.RankReady(rank=self._context.rank, **info["meshift"]))


def prepare() -> None:
    """Import before the fork, for all ranks at once. Not on a GPU: imports of SGLang's ask CUDA for its devices, and a
    fork of a process that has done so can't use them."""
    if os.environ.get(CPU_PLATFORM_VARIABLE) == "1":
        import_engine()


@functools.cache
def import_engine() -> None:
    """Import SGLang, hook into it, and import its models, which must find the hooks in place."""
    import sglang.srt.entrypoints.engine
    import sglang.srt.managers.scheduler
    from sglang.srt.managers.io_struct import hook_custom_types
    from sglang.srt.plugins import load_plugins

    from meshift.backends.sglang.plugin import hooks

    logging.getLogger(_BATCH_LOGGER).setLevel(logging.WARNING)
    load_plugins()
    hooks.check_applied()
    hook_custom_types(*wire.COMMANDS)
    import sglang.srt.models.registry  # noqa: F401


def run(spec_path: str) -> None:
    """Run one rank until it is killed."""
    spec = msgspec.json.decode(Path(spec_path).read_bytes(), type=RankSpec)
    faulthandler.enable()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    outbox = Outbox(spec.reports_address)
    context = RankContext(
        spec.rank, outbox, spec.reports_address, spec.data_host, spec.data_transport, spec.data_bytes_per_s
    )
    install(context)
    try:
        _serve(spec, context)
    finally:
        outbox.close()


def _serve(spec: RankSpec, context: RankContext) -> None:
    import_engine()
    from sglang.srt.managers.scheduler import run_scheduler_process

    server_args = _resolve(spec)
    context.outbox.send(wire.RankPhase(rank=spec.rank, phase="loading weights"))
    # Returns only when the scheduler has failed; it has logged why.
    run_scheduler_process(
        server_args,
        _port_args(spec),
        spec.rank,
        spec.tensor_rank,
        spec.stage,
        None,
        ReadyReporter(context),
    )
    sys.exit(EXIT_FAILED)


def _resolve(spec: RankSpec) -> Any:
    """SGLang's arguments, completed by it. Each rank does it for itself, from equal input."""
    from sglang.srt.entrypoints.engine import _set_envs_and_config
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(**spec.server_arguments)
    server_args.resolve_once()
    _set_envs_and_config(server_args)
    # That installed a handler which kills SGLang's whole process tree; ours is not SGLang's.
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    server_args.check_server_args()
    return server_args


def _port_args(spec: RankSpec) -> Any:
    from sglang.srt.server_args import PortArgs

    return PortArgs(
        scheduler_input_ipc_name=spec.commands_address,
        tokenizer_ipc_name=_UNUSED_ADDRESS,
        detokenizer_ipc_name=_UNUSED_ADDRESS,
        rpc_ipc_name=_UNUSED_ADDRESS,
        metrics_ipc_name=_UNUSED_ADDRESS,
        tokenizer_worker_ipc_name=None,
        decoupled_spec_ipc_config=None,
        nccl_port=spec.rendezvous_port,
        instance_id=f"meshift{spec.worker_pid}x{spec.rendezvous_port}",
    )
