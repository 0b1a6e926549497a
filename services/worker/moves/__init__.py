"""Moves of running requests between workers (Llumnix, section 4.2): `docs/moves.md`."""
