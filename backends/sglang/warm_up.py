"""First requests, so that those of clients don't pay for first times: one with all the trimmings, and one that moves
from the engine to itself."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from meshift.backends.base import EngineRequest, EngineStartError, MoveKey, MoveRefused, TokenEvent
from meshift.backends.sglang.moves_in import MovesIn
from meshift.backends.sglang.moves_out import MovesOut
from meshift.kv_memory.layout import KvLayout
from meshift.schemas.identity import RequestKey
from meshift.schemas.requests import Sampling

TOKENS = 8
MOVED_TOKENS = 40
"""Of the output of the one that moves: it must not end before it has moved."""

SAMPLING = Sampling(
    max_new_tokens=TOKENS,
    min_new_tokens=TOKENS,
    top_p=0.9,
    top_k=50,
    frequency_penalty=0.1,
    presence_penalty=0.1,
    repetition_penalty=1.1,
    ignore_eos=True,
    seed=0,
    logprobs=1,
)
PLAIN_KEY = RequestKey("warm-up", 0, 0)
MOVE_KEY = MoveKey("warm-up-move", 0, 1)
DEADLINE_S = 600.0
"""Of its reservation; the start has a deadline of its own."""

logger = logging.getLogger(__name__)


class WarmUp:
    """Listens to the engine while it starts."""

    def __init__(self, vocabulary_size: int, tokens_max: int) -> None:
        self._prompt = [1 + index % (vocabulary_size - 1) for index in range(TOKENS)]
        self._tokens_max = tokens_max
        self._counts: dict[RequestKey, int] = {}
        self._ended: set[RequestKey] = set()
        self._failure = ""
        self._changed = asyncio.Event()

    def on_step(self, events: Sequence[TokenEvent]) -> None:
        """What a step gave."""
        for event in events:
            self._counts[event.key] = self._counts.get(event.key, 0) + len(event.tokens)
            if event.finish is not None:
                self._ended.add(event.key)
        self._changed.set()

    def fail(self, reason: str) -> None:
        """Nothing more will come."""
        self._failure = reason
        self._changed.set()

    async def run(self, submit: Callable[[EngineRequest], None]) -> None:
        """One request. Raises EngineStartError if the engine fails."""
        submit(EngineRequest(PLAIN_KEY, self._prompt, (), SAMPLING))
        await self._until(lambda: PLAIN_KEY in self._ended)

    async def run_move(
        self,
        submit: Callable[[EngineRequest], None],
        cancel: Callable[[RequestKey], None],
        out: MovesOut,
        into: MovesIn,
        layout: KvLayout,
    ) -> None:
        """One request that moves. Raises EngineStartError if the engine fails."""
        tokens = min(MOVED_TOKENS, self._tokens_max - len(self._prompt))
        sampling = SAMPLING.model_copy(update={"max_new_tokens": tokens, "min_new_tokens": min(tokens, TOKENS)})
        request = EngineRequest(MOVE_KEY.source, self._prompt, (), sampling)
        submit(request)
        await self._until(lambda: self._counts.get(MOVE_KEY.source, 0) > 0)
        try:
            await self._move(request, out, into, layout)
        except MoveRefused as refusal:
            logger.warning("no request moved while the engine warmed up: %s", refusal)
            await into.abort(MOVE_KEY)
            await out.resume(MOVE_KEY, 0)
            cancel(MOVE_KEY.source)
        await self._until(lambda: bool({MOVE_KEY.source, MOVE_KEY.destination} & self._ended))

    @staticmethod
    async def _move(request: EngineRequest, out: MovesOut, into: MovesIn, layout: KvLayout) -> None:
        begun = await out.begin(MOVE_KEY)
        slots = len(begun.tokens) + begun.growth_max
        reserved = await into.reserve(MOVE_KEY, layout, begun.tokens, slots, DEADLINE_S)
        sent = await out.send(MOVE_KEY, reserved.cached, reserved)
        frozen = await out.freeze(MOVE_KEY, sent.end, reserved)
        arrival = EngineRequest(MOVE_KEY.destination, request.prompt, frozen.output, request.sampling)
        await into.commit(MOVE_KEY, frozen, arrival, DEADLINE_S)
        await out.release(MOVE_KEY)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self._failure:
                raise EngineStartError(self._failure)
            self._changed.clear()
            await self._changed.wait()
