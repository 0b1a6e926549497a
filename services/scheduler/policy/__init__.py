"""Scheduling decisions: pure functions of what was reported, without asyncio, bus, clock or randomness."""
