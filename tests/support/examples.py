"""How many examples a property is tried on."""

import hypothesis

USUAL = 100
"""Hypothesis' own number."""


def examples(count: int) -> int:
    """`count` where properties get their usual number of examples, and so many fewer where they get fewer (see
    `tests/conftest.py`)."""
    return max(1, count * hypothesis.settings().max_examples // USUAL)
