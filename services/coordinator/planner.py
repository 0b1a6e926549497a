"""Plans a change of an instance's layout (PipeLive, algorithm 1, phases 1 and 5). Pure.

    C_tmp[i] = C_cur[i] | C_tgt[i]                                      what stage i holds meanwhile
    B_max(i) = floor((memory_i - reserve - weights(C_tmp[i])) / bytes_per_block(C_tmp[i]))
    B_shrink = min over stages of B_max(i);    B_new: the same with C_tgt

Blocks are counted in pages: one page of tokens takes one block of each group of layers that a stage holds. All stages
have the same number of pages."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from meshift.schemas.layouts import (
    LayoutFacts,
    LayoutFlags,
    LayoutPlan,
    LayoutRefusal,
    StageFacts,
    StageTransfer,
    counts_of,
)
from meshift.services.coordinator.wording import describe_plan

Range = tuple[int, int]

UNBOUNDED = 1 << 60
"""Pages of a stage without layers, or without a bound of its memory."""


def plan_change(facts: LayoutFacts, target: Sequence[Range], flags: LayoutFlags) -> LayoutPlan:
    """What the change comes to, and, if it can't be, why."""
    current, wanted = tuple(facts.split), tuple(target)
    objection = _objection(facts, wanted)
    if objection is not None:
        return _refused(facts, wanted, flags, *objection)
    plan = _sized(facts, wanted, flags)
    refusal, reason = _misfit(facts, plan, flags)
    plan = plan.model_copy(update={"refusal": refusal, "reason": reason})
    return plan.model_copy(update={"words": describe_plan(plan, current)})


def added_layers(current: Sequence[Range], target: Sequence[Range]) -> tuple[tuple[int, ...], ...]:
    """M_add: what each stage has in the target and hasn't now."""
    return tuple(tuple(_without(there, here)) for here, there in zip(current, target, strict=True))


def deleted_layers(current: Sequence[Range], target: Sequence[Range]) -> tuple[tuple[int, ...], ...]:
    """M_del: what each stage has now and hasn't in the target."""
    return added_layers(target, current)


def moved_layers(current: Sequence[Range], target: Sequence[Range]) -> tuple[StageTransfer, ...]:
    """M_mig: what each stage has now and another one has in the target, by source and destination. Both are contiguous,
    so that each pair's layers are."""
    found = []
    for source, (begin, end) in enumerate(current):
        for destination, (low, high) in enumerate(target):
            span = (max(begin, low), min(end, high))
            if source != destination and span[0] < span[1]:
                found.append(StageTransfer(source=source, destination=destination, layers=span))
    return tuple(found)


def groups_of(ranges: Iterable[Range], layers_per_group: int) -> int:
    """How many groups of layers hold these ranges together."""
    return len({layer // layers_per_group for begin, end in ranges for layer in range(begin, end)})


def pages_possible(stages: Sequence[StageFacts], held: Sequence[Sequence[Range]], layers_per_group: int) -> int:
    """The most pages that all stages have memory for, when stage i holds the ranges `held[i]`. Negative: the weights
    alone are too much."""
    return min(_pages_of(stage, ranges, layers_per_group) for stage, ranges in zip(stages, held, strict=True))


def nearest_aligned(target: Sequence[Range], layers: int, layers_per_group: int) -> tuple[tuple[int, ...], ...]:
    """Splits at groups' boundaries that are like this one, the most alike first: each boundary to the nearest, all
    down, all up."""
    bounds = [end for _, end in target[:-1]]
    down = [bound // layers_per_group * layers_per_group for bound in bounds]
    up = [min(layers, -(-bound // layers_per_group) * layers_per_group) for bound in bounds]
    near = [low if bound - low <= high - bound else high for bound, low, high in zip(bounds, down, up, strict=True)]
    found: dict[tuple[int, ...], int] = {}
    for chosen in (near, down, up):
        distance = sum(abs(a - b) for a, b in zip(chosen, bounds, strict=True))
        found.setdefault(counts_of(tuple(pairwise((0, *chosen, layers)))), distance)
    return tuple(sorted(found, key=lambda counts: (found[counts], counts)))


# ---- inside


def _objection(facts: LayoutFacts, target: tuple[Range, ...]) -> tuple[LayoutRefusal, str] | None:
    """Why this isn't a layout to go to, whatever memory there is."""
    stages, layers, k = len(facts.split), facts.split[-1][1], facts.layers_per_group
    if len(target) != stages:
        return LayoutRefusal.INVALID, f"{len(target)} stages, and the instance has {stages}; a stage may have no layers"
    follows = target[0][0] == 0 and all(before[1] == after[0] for before, after in pairwise(target))
    if not follows or any(begin > end for begin, end in target):
        return LayoutRefusal.INVALID, f"{list(target)} are not layers that follow one another from 0"
    if target[-1][1] != layers:
        return LayoutRefusal.INVALID, f"{target[-1][1]} layers in all, and the model has {layers}"
    if target == tuple(facts.split):
        return LayoutRefusal.UNCHANGED, "that is its layout"
    if any(end % k and end != layers for _, end in target):
        near = " or ".join(map(_words, nearest_aligned(target, layers, k)))
        return LayoutRefusal.UNALIGNED, f"layers move in groups of {k}; near {_words(counts_of(target))}: {near}"
    return None


def _sized(facts: LayoutFacts, target: tuple[Range, ...], flags: LayoutFlags) -> LayoutPlan:
    current, k, page = tuple(facts.split), facts.layers_per_group, facts.page_tokens
    added = added_layers(current, target)
    both = [(here, there) for here, there in zip(current, target, strict=True)]
    alone = [(there,) for there in target]
    # A restart never holds both layouts.
    during = pages_possible(facts.stages, alone if flags.restart else both, k) * page
    after = pages_possible(facts.stages, alone, k) * page
    if flags.no_resize:
        after = min(after, facts.capacity)
    return LayoutPlan(
        current=current,
        target=target,
        epoch=facts.epoch,
        flags=flags,
        added=added,
        moved=moved_layers(current, target),
        deleted=deleted_layers(current, target),
        used=facts.used,
        capacity=facts.capacity,
        capacity_during=max(0, min(facts.capacity, during)),
        capacity_after=max(0, min(facts.capacity_max, after)),
        weights_bytes=sum(len(new) * stage.layer_weights for new, stage in zip(added, facts.stages, strict=True)),
        kv_bytes=0 if flags.restart else _kv_bytes(facts, current, target),
    )


def _misfit(facts: LayoutFacts, plan: LayoutPlan, flags: LayoutFlags) -> tuple[LayoutRefusal | None, str]:
    """Whether memory forbids it."""
    if plan.capacity_after < facts.page_tokens:
        return LayoutRefusal.NO_MEMORY, "some stage has no room for its layers in the target and a page of KV"
    if flags.no_resize and plan.capacity_during < facts.capacity:
        need = f"both layouts' layers leave room for {plan.capacity_during} tokens, and there are {facts.capacity}"
        return LayoutRefusal.NO_MEMORY, f"{need}; resizing is left out"
    if not flags.restart and plan.capacity_during < max(facts.used, facts.page_tokens):
        need = f"both layouts' layers leave room for {plan.capacity_during} tokens"
        return LayoutRefusal.NO_MEMORY, f"{need}, and requests hold {facts.used}"
    return None, ""


def _refused(
    facts: LayoutFacts, target: tuple[Range, ...], flags: LayoutFlags, refusal: LayoutRefusal, reason: str
) -> LayoutPlan:
    layers, k = facts.split[-1][1], facts.layers_per_group
    nothing: tuple[tuple[int, ...], ...] = tuple(() for _ in facts.split)
    return LayoutPlan(
        current=facts.split,
        target=target,
        epoch=facts.epoch,
        flags=flags,
        added=nothing,
        moved=(),
        deleted=nothing,
        used=facts.used,
        capacity=facts.capacity,
        capacity_during=facts.capacity,
        capacity_after=facts.capacity,
        weights_bytes=0,
        kv_bytes=0,
        refusal=refusal,
        reason=reason,
        nearest=nearest_aligned(target, layers, k) if refusal is LayoutRefusal.UNALIGNED else (),
        words=(f"refused: {reason}",),
    )


def _pages_of(stage: StageFacts, ranges: Sequence[Range], layers_per_group: int) -> int:
    layers = len({layer for begin, end in ranges for layer in range(begin, end)})
    if stage.budget is None:
        return UNBOUNDED
    left = stage.budget - stage.reserve - layers * stage.layer_weights
    groups = groups_of(ranges, layers_per_group)
    # A stage without layers holds no KV: what it lacks is of no matter unless it has not even its reserve.
    return left // (groups * stage.block) if groups else (UNBOUNDED if left >= 0 else -1)


def _kv_bytes(facts: LayoutFacts, current: tuple[Range, ...], target: tuple[Range, ...]) -> int:
    pages = -(-facts.used // facts.page_tokens)
    return sum(
        groups_of([move.layers], facts.layers_per_group) * pages * facts.stages[move.source].block
        for move in moved_layers(current, target)
    )


def _without(one: Range, other: Range) -> list[int]:
    return [layer for layer in range(*one) if not other[0] <= layer < other[1]]


def _words(counts: Sequence[int]) -> str:
    return "/".join(map(str, counts))
