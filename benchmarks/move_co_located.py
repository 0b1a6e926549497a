"""Other requests beside moves: two that stay, one on each worker, while a third is moved to and fro."""

import time
from collections.abc import Sequence
from typing import Any

from meshift.benchmarks.move_mesh import MeshStream, MoveBenchmarkError, MoveMesh
from meshift.benchmarks.move_overhead import MOVE, QUIET
from meshift.schemas.moves import MoveMode, MoveOutcome

WINDOW_STEPS = 24
"""Of each worker, in a quiet window."""
SETTLE_STEPS = 4
OUTPUT_TOKENS_MAX = 3000
"""More than they get to: they are cancelled at the end."""


async def measure(mesh: MoveMesh, prompts: tuple[Sequence[int], ...], pairs: int) -> list[dict[str, Any]]:
    """Samples of windows, of moves and of steps. `prompts`: the mover's, and those of the two that stay."""
    mover, *others = (
        mesh.open(f"co-located-{number}", prompt, OUTPUT_TOKENS_MAX) for number, prompt in enumerate(prompts)
    )
    streams = [mover, *others]
    try:
        for stream in streams:
            await mesh.until_tokens(stream, SETTLE_STEPS)
        await _part(mesh, others)
        mesh.tap.step_threads = dict(mesh.ranks)
        samples: list[dict[str, Any]] = []
        # The first pair is for warming up: it comes to no window.
        for pair in range(-1, pairs):
            windows = await _pair(mesh, mover, others, pair)
            samples += windows if pair >= 0 else []
        samples += [{"measure": "step", **step._asdict()} for step in mesh.tap.steps]
        return samples
    finally:
        mesh.tap.step_threads = {}
        for stream in streams:
            await mesh.close(stream)


async def _part(mesh: MoveMesh, others: list[MeshStream]) -> None:
    """One on each worker."""
    first, second = others
    if first.instance == second.instance:
        left = first.instance
        await _move(mesh, first)
        await mesh.tap.until(lambda: first.instance != left, "a request on each worker")


async def _pair(mesh: MoveMesh, mover: MeshStream, others: list[MeshStream], pair: int) -> list[dict[str, Any]]:
    source = mover.instance
    ends = {"source": source, "destination": mesh.other(source)}
    common = {"measure": "window", "pair": pair, "mover": mover.name, **ends}
    begin_ns = time.monotonic_ns()
    await _steps(mesh, [mover, *others], WINDOW_STEPS)
    quiet = {**common, "kind": QUIET, "begin_ns": begin_ns, "end_ns": time.monotonic_ns()}
    begin_ns = time.monotonic_ns()
    figures = await _move(mesh, mover)
    move = {**common, "kind": MOVE, "begin_ns": begin_ns, "end_ns": time.monotonic_ns(), "figures": figures}
    await mesh.tap.until(lambda: mover.instance != source, "a token after the move")
    await _steps(mesh, [mover, *others], SETTLE_STEPS)
    return [quiet, move]


async def _move(mesh: MoveMesh, stream: MeshStream) -> dict[str, Any]:
    report = await mesh.order(stream, MoveMode.LIVE)
    if report.outcome is not MoveOutcome.MOVED:
        raise MoveBenchmarkError(f"{stream.name} came to {report.outcome}: {report.reason}")
    return report.figures.model_dump()


async def _steps(mesh: MoveMesh, streams: list[MeshStream], count: int) -> None:
    """So many more tokens of each."""
    wanted = [(stream, len(stream.output) + count) for stream in streams]
    for stream, tokens in wanted:
        await mesh.until_tokens(stream, tokens)
