"""The frontend process: REST over the core."""

import logging
from pathlib import Path

from pydantic import Field, SecretStr

from meshift.schemas.errors import PeerTimeout
from meshift.schemas.identity import FrontendRef
from meshift.services.exposition import BusCollector, Exposition
from meshift.services.frontend.core import FrontendCore, FrontendOptions
from meshift.services.frontend.http.access import Access, AccessError, make_access, read_keys
from meshift.services.frontend.http.app import create_app
from meshift.services.frontend.http.observing import HttpCounters
from meshift.services.frontend.http.server import HttpServer
from meshift.services.frontend.http.settings import HttpSettings, ToolParserName
from meshift.services.frontend.metrics import FrontendCollector
from meshift.services.frontend.text.registry import TokenizerRegistry
from meshift.services.process import (
    EXIT_UNAVAILABLE,
    ServiceSettings,
    StopSignal,
    configure_logging,
    connect_bus,
    new_incarnation,
    say,
    start_tracing,
)

logger = logging.getLogger(__name__)


class FrontendSettings(ServiceSettings, FrontendOptions):
    """Settings of a frontend."""

    frontend_id: str = Field("frontend-1", description="its name: one live frontend a name")
    host: str = Field("127.0.0.1", description="address that the REST API listens on")
    port: int = Field(8000, ge=0, le=65535, description="its port; 0 for any free one")
    tokenizers: dict[str, Path] = Field(
        default_factory=dict,
        description="model name -> tokenizer folder, where it isn't the folder that the worker names",
    )
    tool_parser: ToolParserName = Field(
        "auto", description="how the model writes tool calls; auto: by its chat template; none: tools are refused"
    )
    api_keys: SecretStr = Field(
        SecretStr(""), description="clients' keys, with commas; better in the environment or in a file"
    )
    api_keys_file: Path | None = Field(None, description="file with clients' keys, one a line")
    admin_keys: SecretStr = Field(SecretStr(""), description="operators' keys, for /admin, with commas")
    admin_keys_file: Path | None = Field(None, description="file with operators' keys, one a line")
    insecure_no_keys: bool = Field(
        False, description="for development: whoever reaches the port may ask what has no keys"
    )
    grace_s: int = Field(30, ge=0, description="time for open requests to end when it is told to stop")


def access_of(settings: FrontendSettings) -> Access:
    """Who may ask what. Raises `AccessError`."""
    return make_access(
        read_keys(settings.api_keys.get_secret_value(), settings.api_keys_file),
        read_keys(settings.admin_keys.get_secret_value(), settings.admin_keys_file),
        insecure_no_keys=settings.insecure_no_keys,
    )


async def run(settings: FrontendSettings) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code."""
    configure_logging(settings.log_level)
    try:
        access = access_of(settings)
    except AccessError as error:
        logger.error("frontend %s can't start: %s", settings.frontend_id, error)
        return EXIT_UNAVAILABLE
    if settings.insecure_no_keys:
        logger.warning("without keys: whoever reaches %s:%d may use it", settings.host, settings.port)
    stop = StopSignal()
    bus = connect_bus(settings, settings.frontend_id)
    tracing = start_tracing("frontend", settings.frontend_id)
    ref = FrontendRef(frontend_id=settings.frontend_id, incarnation=new_incarnation())
    core = FrontendCore(ref, bus, settings, tracer=tracing.tracer("meshift.frontend"))
    counters = HttpCounters()
    exposition = Exposition(FrontendCollector(core, counters), BusCollector("frontend", bus.counters))
    app = create_app(
        core,
        TokenizerRegistry(settings.tokenizers),
        HttpSettings(tool_parser=settings.tool_parser),
        access=access,
        tracer=tracing.tracer("meshift.frontend.http"),
        counters=counters,
        metrics=exposition.render,
    )
    server = HttpServer(app, settings.host, settings.port, grace_s=settings.grace_s)
    try:
        await stop.unless_stopped(_start(core, server))
        if not stop.caught:
            say(f"frontend {settings.frontend_id} is ready at http://{settings.host}:{server.port}")
        await stop.wait()
        await server.stop()
    except PeerTimeout as error:
        logger.error("frontend %s can't join the bus: %s", settings.frontend_id, error)
        return EXIT_UNAVAILABLE
    except OSError as error:
        logger.error("frontend %s can't listen: %s", settings.frontend_id, error)
        return EXIT_UNAVAILABLE
    finally:
        await core.stop()
        tracing.shutdown()
    return 0


async def _start(core: FrontendCore, server: HttpServer) -> None:
    await core.start()
    await server.start()
