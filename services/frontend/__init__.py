"""The frontend: the one stable end of a stream. `core` has no HTTP in it; simulation and tests drive it."""
