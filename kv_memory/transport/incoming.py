"""Open transfers at their receiving end: who may send what, and what becomes of a patch that has arrived."""

import asyncio
import hmac
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from meshift.kv_memory.staging import StagingBuffer, StagingPool
from meshift.kv_memory.transport.base import Patch, PatchHandler


class Refused(Exception):
    """The patch isn't taken; its sender is told why."""


@dataclass(frozen=True, slots=True, eq=False)
class OpenTransfer:
    """One, from `open` to `close`."""

    transfer_id: str
    token: str
    handler: PatchHandler


class OpenTransfers:
    """All of one receiving end. Any thread may open and close; handlers run on the transport's."""

    def __init__(self, new_token: Callable[[], str] = secrets.token_hex) -> None:
        """`new_token`: 64 hexadecimal digits that nobody can guess."""
        self._new_token = new_token
        self._open: dict[str, OpenTransfer] = {}

    @property
    def count(self) -> int:
        """How many are open."""
        return len(self._open)

    def open(self, transfer_id: str, handler: PatchHandler) -> OpenTransfer:
        """Raises ValueError if it is open already."""
        transfer = OpenTransfer(transfer_id, self._new_token(), handler)
        # One step, since another thread may do the same now.
        if self._open.setdefault(transfer_id, transfer) is not transfer:
            raise ValueError(f"transfer {transfer_id} is open already")
        return transfer

    def close(self, transfer_id: str) -> None:
        """Idempotent."""
        self._open.pop(transfer_id, None)

    def clear(self) -> None:
        """Close all."""
        self._open.clear()

    def find(self, transfer_id: str, token: str) -> OpenTransfer | None:
        """The transfer, if it is open and this is its token; takes the same time for any wrong token."""
        transfer = self._open.get(transfer_id)
        if transfer is None or not hmac.compare_digest(transfer.token.encode(), token.encode()):
            return None
        return transfer

    def is_open(self, transfer: OpenTransfer) -> bool:
        """Whether it is still, and not opened anew."""
        return self._open.get(transfer.transfer_id) is transfer

    def apply(self, transfer: OpenTransfer, patch: Patch, received_checksum: int) -> str | None:
        """Have a patch applied; why it is refused, or None."""
        if not self.is_open(transfer):
            return not_open(transfer.transfer_id)
        if received_checksum != patch.checksum:
            return f"checksum of a patch of transfer {patch.transfer_id} is wrong"
        try:
            transfer.handler(patch)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None


class ReceiveMemory:
    """Buffers for payloads that arrive, out of one pool; who asks first is served first."""

    def __init__(self, pool: StagingPool) -> None:
        self._pool = pool
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def acquire(self, size: int) -> StagingBuffer:
        """A buffer, once there is room for it."""
        loop = asyncio.get_running_loop()
        first = not self._waiting
        while True:
            buffer = self._pool.try_acquire(size) if first else None
            if buffer is not None:
                self._wake()
                return buffer
            turn: asyncio.Future[None] = loop.create_future()
            # Who had its turn and found too little room keeps it.
            self._waiting.insert(0 if first else len(self._waiting), turn)
            try:
                await turn
            except BaseException:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                else:
                    self._wake()
                raise
            first = True

    def release(self, buffer: StagingBuffer) -> None:
        """It is free; the next one in the queue tries."""
        buffer.release()
        self._wake()

    def retry(self) -> None:
        """The pool may have room that came back in another way."""
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return


def not_open(transfer_id: str) -> str:
    """The refusal of a patch that nobody waits for."""
    return f"transfer {transfer_id} is not open here"
