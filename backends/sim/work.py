"""What the simulated engine does, and what it tells its listener."""

from enum import Enum, auto
from typing import Literal

Emit = Literal["step", "edges"]


class Work(Enum):
    """What the engine does now."""

    NOTHING = auto()
    PREFILL = auto()
    DECODE = auto()
    HELD = auto()
    """No step, for a while: the layout changes."""
    HALTED = auto()
    """Does no step any more: hung, crashed or stopped."""
