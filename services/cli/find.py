"""Finds the running mesh for the commands that ask it something."""

from pathlib import Path

from pydantic import BaseModel, Field

from meshift.services.cli.paths import state_folder
from meshift.services.cli.state import read_state

URL_DEFAULT = "http://127.0.0.1:8000"
NATS_URL_DEFAULT = "nats://127.0.0.1:4222"


class BusClientSettings(BaseModel):
    """Where the mesh's bus is."""

    nats: str | None = Field(None, description="NATS URL; without it, of the mesh started from here")
    state_dir: Path | None = Field(None, description="where `meshift up` keeps its state; without it, `.meshift`")

    def nats_url(self) -> str:
        """The URL to use."""
        state = read_state(self.state_dir or state_folder())
        return self.nats or (state.nats_url if state else NATS_URL_DEFAULT)


class RestClientSettings(BaseModel):
    """Where the mesh's REST API is."""

    url: str | None = Field(None, description="URL of a frontend; without it, of the mesh started from here")
    state_dir: Path | None = Field(None, description="where `meshift up` keeps its state; without it, `.meshift`")

    def rest_url(self) -> str:
        """The URL to use."""
        state = read_state(self.state_dir or state_folder())
        return (self.url or (state.url if state else URL_DEFAULT)).rstrip("/")
