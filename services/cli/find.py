"""Finds the running mesh for the commands that ask it something."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, Field, SecretStr

from meshift.schemas.errors import MeshError, PeerGone
from meshift.services.cli.errors import CommandError
from meshift.services.cli.paths import state_folder
from meshift.services.cli.state import ClusterState, read_state

URL_DEFAULT = "http://127.0.0.1:8000"
NATS_URL_DEFAULT = "nats://127.0.0.1:4222"


class BusClientSettings(BaseModel):
    """Where the mesh's bus is."""

    nats: str | None = Field(None, description="NATS URL; without it, of the mesh started from here")
    state_dir: Path | None = Field(None, description="where `meshift up` keeps its state; without it, `.meshift`")

    def nats_url(self) -> str:
        """The URL to use."""
        state = self._state()
        return self.nats or (state.nats_url if state else NATS_URL_DEFAULT)

    def metrics_urls(self) -> dict[str, str]:
        """Where the services of that mesh show their metrics, as far as its state file says."""
        state = self._state()
        return state.metrics if state and self.nats in (None, state.nats_url) else {}

    def _state(self) -> ClusterState | None:
        return read_state(self.state_dir or state_folder())


class RestClientSettings(BaseModel):
    """Where the mesh's REST API is."""

    url: str | None = Field(None, description="URL of a frontend; without it, of the mesh started from here")
    api_key: SecretStr | None = Field(None, description="API key, if it asks for one; better in the environment")
    state_dir: Path | None = Field(None, description="where `meshift up` keeps its state; without it, `.meshift`")

    def rest_url(self) -> str:
        """The URL to use."""
        state = read_state(self.state_dir or state_folder())
        return (self.url or (state.url if state else URL_DEFAULT)).rstrip("/")

    def client_key(self) -> str | None:
        """The key to use."""
        return None if self.api_key is None else self.api_key.get_secret_value()


class AdminClientSettings(RestClientSettings):
    """Where the mesh's admin API is."""

    admin_key: SecretStr | None = Field(None, description="admin key, if it asks for one; better in the environment")

    def operator_key(self) -> str | None:
        """The key to use."""
        return None if self.admin_key is None else self.admin_key.get_secret_value()


@contextlib.contextmanager
def told_errors(url: str) -> Iterator[None]:
    """The mesh's errors become what the user is told."""
    try:
        yield
    except PeerGone as error:
        hint = "; `meshift up` starts one" if error.message == f"no mesh answers at {url}" else ""
        raise CommandError(error.message + hint) from error
    except MeshError as error:
        raise CommandError(error.message) from error
