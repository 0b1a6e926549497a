"""Which process of a mesh, or of a bare server, used how much CPU time: where an overhead comes from."""

import os
from collections.abc import Mapping
from pathlib import Path

from meshift.benchmarks.cpu_time import PROC, process_cpu_s, tree

PARTS: Mapping[str, str] = {
    "meshift.backends.sglang.": "rank",
    "sglang::scheduler": "rank",
    "sglang::detokenizer": "detokenizer",
    "sglang.launch_server": "server",
    "nats-server": "nats",
    "meshift.services.cli worker": "worker",
    "meshift.services.cli frontend": "frontend",
    "meshift.services.cli scheduler": "scheduler",
    "meshift.services.cli coordinator": "coordinator",
    "meshift.services.cli up": "up",
}
"""By what stands in a command line. `rank`: the process that computes, on both sides."""

OTHER = "other"


def part_of(command_line: str) -> str:
    """The part that a process is."""
    return next((part for words, part in PARTS.items() if words in command_line), OTHER)


def parts_s(pid: int, proc: Path = PROC) -> dict[str, float]:
    """Seconds, user and system, that each part of a tree has used so far; those that have ended count to their
    parent's."""
    used: dict[str, float] = {}
    for member in tree(pid, proc):
        part = part_of(_command_line(member, proc))
        used[part] = used.get(part, 0.0) + process_cpu_s(member, proc)
    return used


def _command_line(pid: int, proc: Path) -> str:
    try:
        return os.fsdecode((proc / str(pid) / "cmdline").read_bytes()).replace("\0", " ")
    except OSError:
        return ""
