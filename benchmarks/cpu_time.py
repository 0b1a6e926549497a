"""CPU time of a process and all its descendants, from the kernel's own books. Linux."""

import os
from pathlib import Path

PROC = Path("/proc")


def tree(pid: int, proc: Path = PROC) -> list[int]:
    """The process and its descendants; those that ended meanwhile are left out."""
    found, waiting = [], [pid]
    while waiting:
        current = waiting.pop()
        tasks = proc / str(current) / "task"
        try:
            children = [(task / "children").read_text().split() for task in tasks.iterdir()]
        except OSError:
            continue
        found.append(current)
        waiting += [int(child) for group in children for child in group]
    return found


def cpu_s(pid: int, proc: Path = PROC) -> float:
    """Seconds, user and system, that the live processes of a tree have used."""
    return sum(_ticks(member, proc) for member in tree(pid, proc)) / os.sysconf("SC_CLK_TCK")


def _ticks(pid: int, proc: Path) -> int:
    try:
        stat = (proc / str(pid) / "stat").read_text()
    except OSError:
        return 0
    # The command's name, in parentheses, may hold spaces; the 14th and 15th field of all are the 12th and 13th after.
    fields = stat.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
