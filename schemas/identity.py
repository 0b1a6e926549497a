"""Who speaks of what. Never decide by index alone: two unseeded histories must not be spliced.

Named tuples, since they are compared and hashed for every token.
"""

from typing import NamedTuple


class Owner(NamedTuple):
    """One life of one instance. `incarnation` grows with every start, so a restarted instance is someone else."""

    instance_id: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.instance_id}#{self.incarnation}"


class FrontendRef(NamedTuple):
    """One life of one frontend; requests run on its lease."""

    frontend_id: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.frontend_id}#{self.incarnation}"


class RequestKey(NamedTuple):
    """One submission of a request on one owner. Ordered: a greater `(attempt, hop)` supersedes a smaller one."""

    request_id: str
    attempt: int
    """Counts the frontend's submissions, from 1."""
    hop: int
    """Counts the moves within an attempt, from 0."""

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}.{self.hop}"
