"""From the latency that a class of requests is to have to the load of an instance at which it still has it. Pure.

Llumnix (section 4.4.2) gives high-priority requests a target load "that preserves near-ideal decode speed"; what that
is depends on hardware and model, and is measured here: batches of ever more requests of a typical length.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshift.services.worker.policy.virtual_usage import PriorityClass, VirtualUsageSettings


class TargetError(ValueError):
    """A target that can't be read, or can't be met; the message says why."""


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """What a token took at some load."""

    tokens: int
    latency_ms: float


@dataclass(frozen=True, slots=True)
class Target:
    """What a class asks for."""

    name: str
    execution: int
    ratio: float | None
    """Of the latency of a request that is alone; else `limit_ms` counts."""
    limit_ms: float | None

    def limit(self, ideal_ms: float) -> float:
        """In ms a token."""
        return ideal_ms * self.ratio if self.ratio is not None else float(self.limit_ms or 0.0)


_TARGET = re.compile(r"(?P<name>[\w-]+)(?::(?P<execution>-?\d+))?=(?P<value>\d+(?:\.\d+)?)(?P<unit>x|ms)")
KNOWN_EXECUTION = {item.name: item.execution for item in VirtualUsageSettings().classes}


def parse_target(text: str) -> Target:
    """`high=1.2x`, `high=40ms`, or with an execution priority of its own, `gold:2=1.1x`. Raises TargetError."""
    match = _TARGET.fullmatch(text.strip())
    if match is None:
        raise TargetError(f"{text!r} is no target: NAME=1.2x or NAME=40ms, NAME:PRIORITY=... for a class of your own")
    name, execution = match["name"], match["execution"]
    if execution is None and name not in KNOWN_EXECUTION:
        raise TargetError(f"{name} needs its execution priority: {name}:2={match['value']}{match['unit']}")
    number = float(match["value"])
    if match["unit"] == "x" and number <= 1.0:
        raise TargetError(f"{text}: nothing is faster than a request that is alone; the ratio is above 1")
    if number <= 0:
        raise TargetError(f"{text}: a latency is above 0")
    return Target(
        name,
        int(execution) if execution is not None else KNOWN_EXECUTION[name],
        ratio=number if match["unit"] == "x" else None,
        limit_ms=number if match["unit"] == "ms" else None,
    )


def monotone(points: Sequence[LoadPoint]) -> list[LoadPoint]:
    """By load, with latencies that never fall: neighbours that contradict that are taken together (isotonic
    regression), so that one slow moment at a small load doesn't decide."""
    blocks: list[tuple[float, list[LoadPoint]]] = []
    for point in sorted(points, key=lambda item: item.tokens):
        blocks.append((point.latency_ms, [point]))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            _, later = blocks.pop()
            _, earlier = blocks.pop()
            joined = earlier + later
            blocks.append((sum(item.latency_ms for item in joined) / len(joined), joined))
    return [LoadPoint(point.tokens, latency) for latency, members in blocks for point in members]


def load_within(points: Sequence[LoadPoint], limit_ms: float) -> int | None:
    """The greatest load (tokens) with a latency within the limit, between measured points by the straight line; None
    if it is within at all loads that were measured. Raises TargetError if it is at none."""
    curve = monotone(points)
    if curve[0].latency_ms > limit_ms:
        raise TargetError(
            f"{limit_ms:.3g} ms a token can't be met: a request that is alone takes {curve[0].latency_ms:.3g} ms"
        )
    for before, after in pairwise(curve):
        if after.latency_ms > limit_ms:
            share = (limit_ms - before.latency_ms) / (after.latency_ms - before.latency_ms)
            return int(before.tokens + share * (after.tokens - before.tokens))
    return None


def priority_classes(
    targets: Sequence[Target], points: Sequence[LoadPoint]
) -> tuple[VirtualUsageSettings, dict[str, float]]:
    """The classes with their target loads, and each one's limit in ms a token. Whoever has no target has no headroom.
    Raises TargetError."""
    ideal_ms = monotone(points)[0].latency_ms
    limits = {target.name: target.limit(ideal_ms) for target in targets}
    found = {}
    for target in targets:
        try:
            load = load_within(points, limits[target.name])
        except TargetError as error:
            raise TargetError(f"{target.name}: {error}") from error
        found[target.execution] = PriorityClass(name=target.name, execution=target.execution, target_load=load)
    for item in VirtualUsageSettings().classes:
        if item.target_load is None:
            found.setdefault(item.execution, item)
    ordered = tuple(found[execution] for execution in sorted(found, reverse=True))
    return VirtualUsageSettings(classes=ordered), limits


def check_targets(targets: Sequence[Target]) -> None:
    """Raises TargetError for classes that contradict each other."""
    for what, values in (
        ("name", [target.name for target in targets]),
        ("execution priority", [str(target.execution) for target in targets]),
    ):
        twice = sorted({value for value in values if values.count(value) > 1})
        if twice:
            raise TargetError(f"two targets have the {what} {', '.join(twice)}")
