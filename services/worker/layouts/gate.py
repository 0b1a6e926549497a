"""Between moves of requests and the layout: a commit of a layout lets no move begin, and waits for those under way."""

from dataclasses import dataclass

from meshift.kv_memory.layout import KvLayout


@dataclass(slots=True)
class LayoutGate:
    """What moves must know of their instance's layout."""

    kv: KvLayout | None
    """The layout that they move by; None of an engine whose requests don't move."""
    epoch: int = 0
    """A move pins it: what was said under another one gets the answer to try again."""
    closed: bool = False
    """A commit is near: nothing begins, nothing is frozen, and what isn't frozen yet stays."""

    def bars(self, epoch: int) -> bool:
        """Whether a move that pinned that epoch may not go on."""
        return self.closed or epoch != self.epoch
