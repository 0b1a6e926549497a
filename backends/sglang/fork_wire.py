"""What a worker and its fork server tell each other, a packet each."""

import msgspec

MESSAGE_BYTES_MAX = 1 << 20
"""The kernel's own limit for a packet is lower by default, some 200 KB; an environment has a few."""


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Start a rank."""

    spec_path: str
    log_path: str
    """Where its output is appended."""
    environment: dict[str, str]


class Forked(msgspec.Struct, frozen=True, kw_only=True, tag="forked"):
    """The answer; a pidfd comes with it."""

    pid: int


class Exited(msgspec.Struct, frozen=True, kw_only=True, tag="exited"):
    """A rank has ended."""

    pid: int
    code: int
    """Negative: the signal."""
