"""CPU time of a process and all its descendants, and of the whole machine, from the kernel's own books. Linux."""

import os
from pathlib import Path

PROC = Path("/proc")
STAT_FIELDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
BUSY_FIELDS = ("user", "nice", "system", "irq", "softirq")
"""`steal` is what other machines took of the host: it isn't ours, nor another process's."""


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
    """Seconds, user and system, that a tree has used: its live processes, and those that they have waited for."""
    return sum(process_cpu_s(member, proc) for member in tree(pid, proc))


def process_cpu_s(pid: int, proc: Path = PROC) -> float:
    """The same of one process alone, with those of its children that have ended; 0 if there is none."""
    return _ticks(pid, proc) / os.sysconf("SC_CLK_TCK")


def thread_cpu_ns(pid: int, thread_id: int | None = None, proc: Path = PROC) -> int:
    """Nanoseconds that one thread has used, by default a process's main thread. By the scheduler's own count; where the
    kernel keeps none, in ticks. Raises OSError if there is no such thread."""
    task = proc / str(pid) / "task" / str(thread_id or pid)
    try:
        return int((task / "schedstat").read_text().split()[0])
    except FileNotFoundError:
        ticks = sum(map(int, (task / "stat").read_text().rpartition(")")[2].split()[11:13]))
        return ticks * 1_000_000_000 // int(os.sysconf("SC_CLK_TCK"))


def _ticks(pid: int, proc: Path) -> int:
    try:
        stat = (proc / str(pid) / "stat").read_text()
    except OSError:
        return 0
    # The command's name, in parentheses, may hold spaces; the 14th to 17th field of all are the 12th to 15th after it.
    return sum(map(int, stat.rpartition(")")[2].split()[11:15]))


def machine_cpu_s(proc: Path = PROC) -> float:
    """Seconds that all cores together have been busy since the start."""
    fields = dict(zip(STAT_FIELDS, map(int, (proc / "stat").read_text().splitlines()[0].split()[1:]), strict=False))
    return sum(fields[name] for name in BUSY_FIELDS) / os.sysconf("SC_CLK_TCK")
