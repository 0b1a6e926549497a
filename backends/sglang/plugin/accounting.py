"""A rank's memory in numbers: what it reports, and whether the numbers are true."""

import zlib
from typing import TYPE_CHECKING, Any

import torch

from meshift.backends.sglang import wire

if TYPE_CHECKING:
    from meshift.backends.sglang.plugin.agent import RankAgent


def measure(agent: "RankAgent") -> wire.LoadSnapshot:
    """The load as it is between two steps. used + cached + free + reserved = capacity by SGLang's definition of used,
    without what is reserved. (A cached prefix that a reservation has locked counts as used.)"""
    scheduler, reserved = agent.scheduler, agent.moves_in.reservations.tokens
    stats = scheduler.pool_stats_observer.get_pool_stats()
    # Those whose schema is still being compiled wait too.
    waiting = [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]
    return wire.LoadSnapshot(
        capacity=stats.full_capacity,
        used=stats.full_num_used - reserved,
        cached=stats.full_evictable_size,
        free=stats.full_available_size,
        reserved=reserved,
        running=len(agent.live) - len(waiting) - len(agent.moves_out.frozen),
        waiting=len(waiting),
        head_demand=waiting[0].seqlen if waiting else 0,
        queued_demand=sum(req.seqlen for req in waiting),
        step_count=scheduler.forward_ct,
        submits_seen=agent.submits_seen,
        prefill_tokens=agent.prefill_tokens,
        # Set when a request was refused for what those that run may still come to; until one of them leaves.
        batch_full=bool(scheduler.running_batch.batch_is_full),
        waiting_rids=[req.rid for req in waiting[: wire.WAITING_TOLD_MAX]],
    )


def find_problems(agent: "RankAgent") -> list[str]:
    """What is wrong with this rank's KV memory; empty if all is well. Looks at every slot: not for each step.

    Written for one plain KV pool with one token list (no sliding window, no state-space layers).
    """
    scheduler, reservations = agent.scheduler, agent.moves_in.reservations
    allocator, tree, page_size = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache, scheduler.page_size
    holders = [req for req in agent.live.values() if req.kv.holds_kv]
    free_pages = allocator.get_all_free_pages()
    cached_pages = _cached_pages(tree, page_size)
    private_pages = [_private_pages(scheduler, req) for req in holders]
    private_pages += [torch.unique(reservation.slots // page_size) for _, reservation in reservations.items()]
    problems = _partition_problems(free_pages, cached_pages, private_pages)
    held = sum(len(pages) for pages in private_pages) * page_size
    accounted = allocator.available_size() + tree.evictable_size() + tree.protected_size() + held
    if accounted != scheduler.max_total_num_tokens:
        problems.append(
            f"free {allocator.available_size()} + evictable {tree.evictable_size()} + protected "
            f"{tree.protected_size()} + private {held} is not {scheduler.max_total_num_tokens}"
        )
    if not holders and not len(reservations) and tree.protected_size():
        problems.append(f"{tree.protected_size()} cached tokens are locked by nobody")
    rows = len(scheduler.req_to_token_pool.free_slots) + len(holders)
    if rows != scheduler.req_to_token_pool.size:
        problems.append(f"{rows} request rows are free or held, of {scheduler.req_to_token_pool.size}")
    return problems


def _cached_pages(tree: Any, page_size: int) -> torch.Tensor:
    if tree.disable:
        return torch.empty(0, dtype=torch.int64)
    slots: torch.Tensor = tree.all_values_flatten().to(torch.int64)
    return torch.unique(slots // page_size) if page_size > 1 else slots


def _private_pages(scheduler: Any, req: Any) -> torch.Tensor:
    """Pages of a request outside the prefix tree."""
    row = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
    slots = row[req.kv.cache_protected_len : req.kv.kv_allocated_len].to(torch.int64)
    pages: torch.Tensor = torch.unique(slots // scheduler.page_size)
    return pages


def _partition_problems(
    free_pages: torch.Tensor, cached_pages: torch.Tensor, private_pages: list[torch.Tensor]
) -> list[str]:
    """Each page must be in one place."""
    pages = torch.cat([free_pages.to(torch.int64), cached_pages, *private_pages])
    values, counts = torch.unique(pages, return_counts=True)
    doubled = values[counts > 1]
    if len(doubled):
        return [f"{len(doubled)} pages are in two places, among them {doubled[:8].tolist()}"]
    return []


def fingerprint(agent: "RankAgent") -> int:
    """Equal on two ranks only if they hold the same requests, running, frozen and expected, in the same slots, and
    will give out the same next."""
    scheduler = agent.scheduler
    parts = [scheduler.max_total_num_tokens, len(scheduler.req_to_token_pool.free_slots)]
    digest = zlib.crc32(repr(parts).encode())
    free_pages = scheduler.token_to_kv_pool_allocator.get_all_free_pages()
    digest = zlib.crc32(free_pages.to(torch.int64).cpu().numpy().tobytes(), digest)
    frozen = agent.moves_out.frozen
    for rid, req in sorted(agent.live.items()):
        held = f"{rid} {req.kv.req_pool_idx} {req.kv.kv_allocated_len} {req in frozen}"
        digest = zlib.crc32(held.encode(), digest)
        if req.kv.holds_kv:
            row = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : req.kv.kv_allocated_len]
            digest = zlib.crc32(row.to(torch.int64).cpu().numpy().tobytes(), digest)
    for rid, reservation in agent.moves_in.reservations.items():
        digest = zlib.crc32(f"{rid} {reservation.cached}".encode(), digest)
        digest = zlib.crc32(reservation.slots.cpu().numpy().tobytes(), digest)
    waiting = [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]
    return zlib.crc32(repr([req.rid for req in waiting]).encode(), digest)
