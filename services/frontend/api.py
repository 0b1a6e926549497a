"""What the HTTP shell (and tests, and simulation) ask of the frontend core."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from meshift.schemas.admin import DrainBody, InstanceList, MoveBody, MoveList, RequestList
from meshift.schemas.instances import DrainReply, LoadReport, ModelInfo
from meshift.schemas.memory import MemoryBody, MemoryReply
from meshift.schemas.moves import MoveReport
from meshift.schemas.reconfiguring import ReconfigurationsReply, ReconfigureBody, ReconfigureReport
from meshift.schemas.requests import Finish, Priority, Sampling, TokenLogprob
from meshift.schemas.steering import Changes, DecisionsReply, DecisionsRequest, PolicyReply, RequestExplanation


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation: token ids in."""

    request_id: str
    model: str
    prompt: Sequence[int]
    sampling: Sampling
    priority: Priority = field(default_factory=Priority)
    operation: str = "chat"
    """For traces: what the client called, in the words of `gen_ai.operation.name`."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What arrived: tokens [start, start + len(tokens)) of the output, and the finish with the last of them."""

    start: int
    tokens: Sequence[int]
    finish: Finish | None = None
    logprobs: Sequence[TokenLogprob] | None = None
    """One a token, where the request asked for them."""


class TokenStream(Protocol):
    """The stable end of a stream, whatever moves or dies behind it. Exactly once: no gap, no repetition."""

    def __aiter__(self) -> AsyncIterator[Chunk]:
        """Chunks in order; ends after the one with the finish. Raises a `MeshError` if the request can't go on."""

    async def cancel(self) -> None:
        """The client went away: stop the request on its owner and free its memory. Idempotent; harmless after the
        finish."""


class Steering(Protocol):
    """What operators ask of the scheduler. All raise Unavailable when none answers, PeerTimeout when not in time."""

    async def policy(self) -> PolicyReply:
        """The settings that are in force."""

    async def change_policy(self, changes: Changes) -> PolicyReply:
        """Change settings, by section, from the next decision on. Raises InvalidRequest naming the field."""

    async def decisions(self, request: DecisionsRequest) -> DecisionsReply:
        """The scheduler's newest decisions, with what they were made from."""

    async def explain(self, request_id: str) -> RequestExplanation:
        """Where a request was sent and moved, and why. Raises NotFound if nothing is known of it."""


class Operators(Protocol):
    """What operators ask of the whole mesh, at whichever frontend."""

    async def instances(self) -> InstanceList:
        """The live instances, with what each says of itself now."""

    async def requests(self) -> RequestList:
        """The open requests of all frontends."""

    async def moves(self) -> MoveList:
        """What the live instances tell of moves."""

    async def move(self, request_id: str, body: MoveBody) -> MoveReport:
        """Move an open request, whichever frontend's it is. Returns when the move has begun, or, if `body.wait`, ended,
        well or not. Raises NotFound (`request_id` or `destination`), MoveDeclined if it doesn't begin, PeerTimeout."""

    async def drain(self, instance_id: str, body: DrainBody) -> DrainReply:
        """Let an instance move its requests away and leave. Returns when it has begun. Raises NotFound, PeerTimeout, or
        what the instance refuses with."""

    async def memory(self, instance_id: str) -> MemoryReply:
        """An instance's KV memory, in tokens, pages, units and bytes. Raises NotFound, PeerTimeout, Unavailable."""

    async def resize_memory(self, instance_id: str, body: MemoryBody) -> MemoryReply:
        """Change an instance's KV capacity while it serves. Raises NotFound, PeerTimeout, or what the instance refuses
        with."""


class Reconfiguring(Protocol):
    """Changes of the layouts of running instances, by the coordinator. All raise Unavailable if there is none, and
    PeerTimeout."""

    async def reconfigure(self, instance_id: str, body: ReconfigureBody) -> ReconfigureReport:
        """Returns when it has begun, is planned (`body.dry_run`) or, with `body.wait`, has ended. Raises NotFound,
        InvalidRequest (`layers`), Unsupported, LayoutDeclined if it doesn't begin."""

    async def cancel(self, instance_id: str) -> ReconfigureReport:
        """Undo the one that is under way. Returns at once. Raises NotFound if there is none."""

    async def reconfigurations(self, instance_id: str | None = None) -> ReconfigurationsReply:
        """Those that are under way, and the newest that ended."""


class Frontend(Protocol):
    """The core."""

    @property
    def reconfiguring(self) -> Reconfiguring:
        """Changes of layouts."""

    @property
    def steering(self) -> Steering:
        """Policy and decisions."""

    def models(self) -> list[ModelInfo]:
        """Models of the live instances, by name."""

    def instances(self) -> list[LoadReport]:
        """The newest reports of the live instances."""

    def ready(self) -> bool:
        """Whether some live instance takes requests."""

    def scheduler_alive(self) -> bool:
        """False: bypass mode, this frontend dispatches by itself."""

    @property
    def operators(self) -> Operators:
        """What operators ask of the mesh."""

    async def generate(self, request: GenerateRequest) -> TokenStream:
        """Dispatch and submit; returns when an owner has taken it. Raises InvalidRequest, ContextTooLong, NotFound
        (no such model), MessageTooLarge, Overloaded, Unavailable."""
