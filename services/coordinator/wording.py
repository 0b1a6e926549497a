"""A plan, in words and numbers. Pure."""

from collections.abc import Sequence

from meshift.schemas.layouts import LayoutPlan, counts_of

MIB = 1024 * 1024


def describe_plan(plan: LayoutPlan, current: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    """Lines to be read by an operator."""
    lines = [f"{words_of(counts_of(tuple(current)))} -> {words_of(counts_of(plan.target))} layers, epoch {plan.epoch}"]
    lines += [
        f"layers {span(move.layers)} go from stage {move.source} to stage {move.destination}" for move in plan.moved
    ]
    lines += _capacity(plan)
    lines.append(f"load {size(plan.weights_bytes)} of weights, copy {size(plan.kv_bytes)} of KV, then what is written")
    lines += [f"without {name}" for name in left_out(plan)]
    if plan.refusal is not None:
        lines.append(f"refused: {plan.reason}")
    return tuple(lines)


def left_out(plan: LayoutPlan) -> list[str]:
    """What its flags leave out."""
    flags = plan.flags
    named = (
        (flags.no_patch, "patches: KV is copied while it is stopped"),
        (flags.no_async, "loading ahead: weights are loaded while it is stopped"),
        (flags.no_resize, "resizing"),
        (flags.restart, "serving: it stops and starts, and requests are computed again"),
    )
    return [words for is_set, words in named if is_set]


def words_of(counts: Sequence[int]) -> str:
    """16/14."""
    return "/".join(map(str, counts))


def span(layers: tuple[int, int]) -> str:
    """12-15, or 12."""
    begin, end = layers
    return str(begin) if end - begin == 1 else f"{begin}-{end - 1}"


def size(byte_count: int) -> str:
    """In MiB."""
    return f"{byte_count / MIB:.1f} MiB"


def _capacity(plan: LayoutPlan) -> list[str]:
    if plan.capacity_during < plan.capacity:
        shrink = f"shrinks to {plan.capacity_during} tokens meanwhile ({plan.used} in use)"
        return [f"capacity {plan.capacity} {shrink}, {plan.capacity_after} afterwards"]
    return [f"capacity {plan.capacity} tokens, {plan.capacity_after} afterwards"]
