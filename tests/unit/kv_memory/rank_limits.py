"""What `rank_host` and its tests agree on, without torch."""

TIMEOUT_S = 20.0
PATCHES = 6
"""That each rank sends."""
