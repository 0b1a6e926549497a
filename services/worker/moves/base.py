"""What the rest of the mesh sees of moves."""

from collections.abc import Awaitable, Collection
from typing import Protocol

from meshift.schemas.identity import Owner
from meshift.schemas.moves import MoveOrder, MoveReport, MovesReply
from meshift.services.worker.requests import RequestRecord


class Moves(Protocol):
    """Of one worker; `WorkerCore.moves` is one."""

    def begin(self, order: MoveOrder) -> Awaitable[MoveReport]:
        """Begin at once, before it returns; await the outcome, or don't. Never raises: an order that can't be obeyed
        (no such request, too many moves at once, no engine that moves) has the outcome `refused` and says why."""

    def can_move(self, record: RequestRecord) -> bool:
        """Whether an order for it would be begun now: it isn't ended nor moving, and fewer than `moves_out_max` do.
        For choosing what to move, `WorkerCore.requests` iterates over all records."""

    def describe(self) -> MovesReply:
        """Those that are under way, and the newest that have ended."""


class Destinations(Protocol):
    """Chooses where a request goes that is to go anywhere."""

    async def choose(self, record: RequestRecord, excluded: Collection[Owner]) -> Owner | None:
        """An instance of the same model that takes requests and can hold it, outside of `excluded` and not this one;
        None if there is none now."""

    def stop(self) -> None:
        """The worker serves no more. Idempotent."""
