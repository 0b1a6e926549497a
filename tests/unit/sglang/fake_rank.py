"""Stands in for a rank process: speaks the wire, without SGLang. How it behaves is in the environment."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import zmq

from meshift.backends.sglang import wire, wire_moves
from meshift.backends.sglang.rank_spec import RankSpec

SHARE = wire_moves.Share(
    layer_start=0, layer_end=2, head_start=0, head_end=1, head_dim=1, dtype="float32", obstacle="a stand-in"
)


def load(submits_seen: int) -> wire.LoadSnapshot:
    return wire.LoadSnapshot(
        capacity=64, used=0, cached=0, free=64, reserved=0, running=0, waiting=0, head_demand=0, queued_demand=0,
        step_count=0, submits_seen=submits_seen,
    )  # fmt: skip


def answer(command: wire.Command, rank: int, submits: int) -> wire.Report | None:
    """What a rank would say; a request is finished at once."""
    if isinstance(command, wire.CheckIntegrity):
        problems = os.environ.get("FAKE_PROBLEM", "")
        return wire.IntegrityReport(
            rank=rank,
            nonce=command.nonce,
            iteration=submits,
            fingerprint=rank if "FAKE_DIFFERENT" in os.environ else 0,
            problems=[problems] if problems else [],
        )
    if isinstance(command, wire.AskMemory):
        units = wire.KvUnits(
            layers_per_group=2, groups=1, last_group_layers=2 - rank, page_tokens=4, unit_bytes=100,
            unit_waste_bytes=4, last_unit_waste_bytes=4 + 48 * rank, units=20, committed=17,
            waste_bytes=17 * (4 + 48 * rank),
        )  # fmt: skip
        return wire.KvMemory(rank=rank, nonce=command.nonce, iteration=submits, resident_bytes=50 + rank, units=units)
    if isinstance(command, wire.Submit) and rank == 0:
        finish = wire.FinishRow(
            row=0,
            reason="length",
            matched_stop=None,
            message="",
            param=None,
            cached_tokens=0,
            preemptions=0,
            preemption_loss_ns=0,
        )
        start = 5 if "FAKE_GAP" in os.environ and submits > 1 else 0
        return wire.StepReport(
            iteration=submits, tickets=[command.ticket], starts=[start], counts=[1], tokens=b"\1\0\0\0",
            finishes=[finish], logprobs=None, load=load(submits),
        )  # fmt: skip
    return None


def prepare() -> None:
    """Nothing more to import."""


def run(spec_path: str) -> None:
    """One rank."""
    spec = msgspec.json.decode(Path(spec_path).read_bytes(), type=RankSpec)
    behaviour = os.environ.get("FAKE_RANK", "")
    print("last words of rank", spec.rank, flush=True)
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "dies" and spec.rank == 1:
        sys.exit(7)
    if behaviour == "leaves a child":
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
        print("child", child.pid, flush=True)
    if behaviour == "quits":
        os.kill(os.getppid(), signal.SIGQUIT)
    context = zmq.Context()
    reports = context.socket(zmq.PUSH)
    reports.connect(spec.reports_address)
    if behaviour == "silent":
        time.sleep(60)
    commands = context.socket(zmq.PULL)
    if spec.rank == 0:
        commands.connect(spec.commands_address)
    reports.send(
        wire.encode(
            wire.RankReady(
                rank=spec.rank,
                capacity=64,
                page_size=1,
                request_tokens_max=60,
                vocabulary_size=100,
                layers=2,
                obeys_schemas=True,
                share=SHARE,
            )
        )
    )
    reports.send(wire.encode(load(0)))
    decoder = msgspec.msgpack.Decoder(wire.Command)
    submits = 0
    while True:
        command = decoder.decode(commands.recv())
        submits += isinstance(command, wire.Submit)
        report = answer(command, spec.rank, submits)
        if report is not None:
            reports.send(wire.encode(report))
        if behaviour == "dies after a request" and submits > 1:
            sys.exit(9)
