"""Physical memory in units that are given and taken back one by one."""

from meshift.kv_memory.arena.base import Arena, ArenaExhausted
from meshift.kv_memory.arena.cpu import CpuArena

__all__ = ["Arena", "ArenaExhausted", "CpuArena"]
