"""A simulated engine: the mesh's `MovableEngine` on a timing model, in virtual time or on a real clock."""

from meshift.backends.sim.engine import DEFAULT_MODEL, SimEngine
from meshift.backends.sim.parameters import SimParameters

__all__ = ["DEFAULT_MODEL", "SimEngine", "SimParameters"]
