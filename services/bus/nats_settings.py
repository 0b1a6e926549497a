"""How to reach a NATS server."""

from dataclasses import dataclass, field

from meshift.services.bus.settings import BusLimits


@dataclass(frozen=True, slots=True)
class NatsSettings:
    """Settings of a `NatsBus`. Credentials may also stand in the URLs."""

    servers: tuple[str, ...]
    """`nats://host:port`, one or several of a cluster."""
    client_name: str
    connect_timeout_s: float = 30.0
    """How long `start` tries to reach a server."""
    attempt_timeout_s: float = 2.0
    """How long one attempt may take."""
    reconnect_wait_s_min: float = 0.05
    reconnect_wait_s_max: float = 5.0
    """Waits between attempts double from the least to this, and are varied at random by half."""
    ping_interval_s: int = 5
    """A server that doesn't answer two pings counts as lost."""
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    credentials_path: str | None = None
    """A `.creds` file (JWT and nkey)."""
    limits: BusLimits = field(default_factory=BusLimits)
