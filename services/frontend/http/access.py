"""Who may ask what: API keys of clients, and of operators."""

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from meshift.schemas.errors import Unauthorized

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/openapi.json", "/docs"})
"""What probes, collectors and readers of the document get without a key. Everything else needs one."""

ADMIN_PREFIX = "/admin"


class AccessError(ValueError):
    """The settings of keys are wrong; the message says how."""


class KeyRing:
    """Some keys. Keeps their digests only."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __contains__(self, key: str) -> bool:
        """Takes the same time for all keys of a length, whichever of the ring's keys it is like, and how much."""
        digest, found = _digest(key), False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True, slots=True)
class Access:
    """The keys of clients and of operators; None: everybody may."""

    clients: KeyRing | None
    admins: KeyRing | None

    def check(self, path: str, authorization: str | None) -> None:
        """Raises `Unauthorized`."""
        if path in OPEN_PATHS:
            return
        is_admin = path == ADMIN_PREFIX or path.startswith(ADMIN_PREFIX + "/")
        ring, kind = (self.admins, "admin key") if is_admin else (self.clients, "API key")
        if ring is None:
            return
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized(f"this needs an {kind}: Authorization: Bearer KEY")
        if key.strip() not in ring:
            raise Unauthorized(f"that is no {kind} of this server")


def make_access(client_keys: Iterable[str], admin_keys: Iterable[str], *, insecure_no_keys: bool) -> Access:
    """What has keys is checked. What has none is open with `insecure_no_keys`; without it, clients' keys must be given,
    and nobody is an operator. Raises `AccessError`."""
    clients, admins = tuple(client_keys), tuple(admin_keys)
    if not clients and not insecure_no_keys:
        raise AccessError(
            "there are no API keys: set MESHIFT_API_KEYS or MESHIFT_API_KEYS_FILE "
            "(for development on this machine alone: --insecure-no-keys)"
        )
    shared = set(clients) & set(admins)
    if shared:
        raise AccessError("a key is both an API key and an admin key")
    may_be_open = None if insecure_no_keys else KeyRing(())
    return Access(KeyRing(clients) if clients else None, KeyRing(admins) if admins else may_be_open)


def read_keys(listed: str, file: Path | None) -> list[str]:
    """Keys that are listed with commas, and those of a file, one a line; `#` begins a comment line. Raises
    `AccessError`."""
    keys = [key.strip() for key in listed.split(",")]
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise AccessError(f"can't read the keys in {file}: {error}") from error
        found = [line.strip() for line in lines if not line.strip().startswith("#")]
        if not any(found):
            raise AccessError(f"there are no keys in {file}")
        keys += found
    return [key for key in keys if key]


class KeyCheck:
    """Lets only requests through that may pass."""

    def __init__(self, app: ASGIApp, *, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._access.check(scope["path"], Headers(scope=scope).get("authorization"))
        await self._app(scope, receive, send)
