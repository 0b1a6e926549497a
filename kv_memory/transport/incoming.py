"""Open transfers at their receiving end: who may send what, and what becomes of a patch that has arrived."""

import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from meshift.kv_memory.transport.base import Patch, PatchHandler

NEW_TOKEN: Callable[[], str] = secrets.token_hex
"""64 hexadecimal digits that nobody can guess."""


@dataclass(frozen=True, slots=True, eq=False)
class OpenTransfer:
    """One, from `open` to `close`."""

    transfer_id: str
    token: str
    handler: PatchHandler


class OpenTransfers:
    """All of one receiving end. Any thread may open and close; handlers run on the transport's."""

    def __init__(self) -> None:
        self._open: dict[str, OpenTransfer] = {}

    def open(self, transfer_id: str, handler: PatchHandler) -> OpenTransfer:
        """Raises ValueError if it is open already."""
        transfer = OpenTransfer(transfer_id, NEW_TOKEN(), handler)
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


def not_open(transfer_id: str) -> str:
    """The refusal of a patch that nobody waits for."""
    return f"transfer {transfer_id} is not open here"
