"""Carries out the runs of an experiment: one after another, or several at once, each in a process of its own. They
share nothing, so that each comes out the same either way. Those that the file has already are left out."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from meshift.benchmarks.experiments.runs import Result, Row, Runs, progress


class RunFailed(RuntimeError):
    """Which run, and what it raised."""


@dataclass(frozen=True, slots=True)
class Task:
    """One run, or several of which each depends on the one before."""

    name: str
    columns: Row
    """What tells its rows from those of all others."""
    work: Callable[[], Result | list[Result]]
    """Does it. It may be called in another process, and is pickled then."""


def carry_out(tasks: Sequence[Task], runs: Runs, jobs: int) -> None:
    """Have all of them in `runs`, in this order, though they may end in another one. Raises ValueError if one of them
    does, RunFailed if one fails otherwise; what has ended before is kept."""
    left = [(place, task) for place, task in enumerate(tasks) if not runs.take(place, task.columns)]
    with progress(len(left)) as tell:
        if jobs > 1 and len(left) > 1:
            _in_processes(left, min(jobs, len(left)), runs, tell)
        else:
            for place, task in left:
                tell(task.name)
                runs.add_all(_work(task), place)


def _in_processes(left: Sequence[tuple[int, Task]], jobs: int, runs: Runs, tell: Callable[[str], None]) -> None:
    others = set(multiprocessing.active_children())
    # Spawned: a fork of a process with threads (the progress bar has one) may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=_begin_process) as executor:
        try:
            futures = {executor.submit(_work, task): (place, task) for place, task in left}
            for future in as_completed(futures):
                place, task = futures.pop(future)
                runs.add_all(_result(future, task), place)
                tell(task.name)
        except BaseException:
            # Ctrl-C too. What is on its way would take minutes.
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()
            raise


def _result(future: "Future[Sequence[Result]]", task: Task) -> Sequence[Result]:
    try:
        return future.result()
    except (ValueError, RunFailed):
        raise
    except Exception as error:
        raise RunFailed(f"{task.name}, or another run at the same time: {error}") from error


def _work(task: Task) -> Sequence[Result]:
    try:
        results = task.work()
    except ValueError as error:
        raise ValueError(f"{task.name}: {error}") from error
    except Exception as error:
        raise RunFailed(f"{task.name}: {type(error).__name__}: {error}") from error
    return results if isinstance(results, list) else [results]


def _begin_process() -> None:
    # Ctrl-C reaches all processes of a terminal; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """However it ends: also when it is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a spawned process"
    parent.join()
    os._exit(1)
