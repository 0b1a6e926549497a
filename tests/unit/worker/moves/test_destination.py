"""The destination's end with an engine that takes its time: what comes late, twice, or in between."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from meshift.backends.base import (
    Committed,
    EngineInfo,
    EngineRequest,
    FrozenRequest,
    MoveKey,
    MoveRefused,
    Refusal,
    Reserved,
)
from meshift.backends.sim import SimEngine
from meshift.backends.sim.engine import DEFAULT_MODEL
from meshift.kv_memory.layout import KvLayout
from meshift.schemas.base import pack_tokens
from meshift.schemas.errors import Stale
from meshift.schemas.identity import FrontendRef, Owner, RequestKey
from meshift.schemas.logprobs import Logprobs, pack_logprobs
from meshift.schemas.moves import (
    MoveAbort,
    MoveCommit,
    MoveCommitReply,
    MoveQuestion,
    MoveRefusal,
    MoveReserve,
    MoveReserveReply,
)
from meshift.schemas.requests import Priority, Sampling
from meshift.services.simulation import virtual_time
from meshift.services.worker.layouts.gate import LayoutGate
from meshift.services.worker.leases import Leases
from meshift.services.worker.moves import destination as module
from meshift.services.worker.moves.context import MoveContext
from meshift.services.worker.moves.destination import IncomingMoves
from meshift.services.worker.moves.moved import MovedAway
from meshift.services.worker.moves.wire import pack_layout
from meshift.services.worker.options import WorkerOptions
from meshift.services.worker.requests import RequestRecord, RequestTable
from meshift.tracing.spans import NO_TRACER

HERE, SOURCE = Owner("here", 1), Owner("source", 1)
FRONTEND = FrontendRef("f", 1)
KEY = RequestKey("r", 1, 1)
NAME: dict[str, Any] = {"request_id": "r", "attempt": 1, "hop": 1, "source": SOURCE, "owner": HERE}
LAYOUT = KvLayout(((0, 1),), ((0, 1),), 1, "uint32", "w")


class SlowEngine(SimEngine):
    """Its calls wait for their gates, and are noted."""

    def __init__(self) -> None:
        super().__init__()
        loop = asyncio.get_running_loop()
        self.gates = {name: loop.create_future() for name in ("reserve", "commit", "learn")}
        self.calls: list[str] = []

    def open(self, name: str, error: Exception | None = None) -> None:
        """The call goes on, or is refused."""
        if error is None:
            self.gates[name].set_result(None)
        else:
            self.gates[name].set_exception(error)

    async def learn_schema(self, json_schema: str) -> None:
        self.calls.append(f"learn {json_schema}")
        await asyncio.shield(self.gates["learn"])

    async def reserve(
        self, key: MoveKey, layout: KvLayout, tokens: Sequence[int], slots: int, deadline_s: float
    ) -> Reserved:
        self.calls.append("reserve")
        await asyncio.shield(self.gates["reserve"])
        return Reserved(slots, 0, layout, ())

    async def commit(self, key: MoveKey, frozen: FrozenRequest, request: EngineRequest, timeout_s: float) -> Committed:
        self.calls.append("commit")
        await asyncio.shield(self.gates["commit"])
        return Committed(7)

    async def abort(self, key: MoveKey) -> None:
        self.calls.append("abort")

    def cancel(self, key: RequestKey) -> None:
        self.calls.append(f"cancel {key}")


class Destination:
    """One worker's incoming moves."""

    def __init__(self, **options: Any) -> None:
        self.engine = SlowEngine()
        self.requests = RequestTable(60.0)
        self.announced: list[RequestKey] = []
        self.context = MoveContext(
            owner=HERE,
            engine=self.engine,
            info=EngineInfo("sim", DEFAULT_MODEL, 1_000, 16, layout=LAYOUT),
            requests=self.requests,
            leases=Leases(),
            peers=None,  # type: ignore[arg-type]
            destinations=None,  # type: ignore[arg-type]
            options=WorkerOptions(**options),
            tracer=NO_TRACER,
            close=self.close,
            announce=lambda record: self.announced.append(record.key),
            moved=MovedAway(60.0),
            gate=LayoutGate(LAYOUT),
        )
        self.moves = IncomingMoves(self.context)

    def close(self, key: RequestKey) -> None:
        running = self.requests.close(key, 0.0)
        if running is not None:
            self.engine.cancel(running.key)

    def reserve(self, slots: int = 32, json_schema: str | None = None) -> "asyncio.Task[MoveReserveReply]":
        message = MoveReserve(
            **NAME,
            layout=pack_layout(LAYOUT),
            tokens=pack_tokens([1]),
            slots=slots,
            json_schema=json_schema,
            deadline_s=10.0,
        )
        return asyncio.get_running_loop().create_task(self.moves.on_reserve(message))

    def commit(self, **changes: Any) -> "asyncio.Task[MoveCommitReply]":
        message = MoveCommit(
            **NAME,
            frontend=FRONTEND,
            lease_s=changes.pop("lease_s", 5.0),
            prompt=pack_tokens([1, 2, 3]),
            output=pack_tokens([4, 5]),
            base=changes.pop("base", 1),
            sampling=changes.pop("sampling", Sampling(max_new_tokens=8)),
            computed=4,
            state=b"",
            timeout_s=2.0,
            **changes,
        )
        return asyncio.get_running_loop().create_task(self.moves.on_commit(message))

    async def reserved(self) -> None:
        asking = self.reserve()
        await asyncio.sleep(0)
        if not self.engine.gates["reserve"].done():
            self.engine.open("reserve")
        assert (await asking).room is not None

    async def committing(self) -> "asyncio.Task[MoveCommitReply]":
        await self.reserved()
        task = self.commit()
        await asyncio.sleep(0.1)
        assert self.engine.calls[-1] == "commit"
        return task

    def abort(self) -> None:
        self.moves.on_abort(MoveAbort(**NAME, reason="given up"))

    def question(self) -> "asyncio.Task[Any]":
        return asyncio.get_running_loop().create_task(self.moves.on_question(MoveQuestion(**NAME)))


def run(scenario: Callable[[Destination], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def main() -> None:
        await scenario(Destination(**options))

    virtual_time.run(main())


def test_a_move_comes_in() -> None:
    async def scenario(there: Destination) -> None:
        committing = await there.committing()
        assert there.requests.get(KEY) is not None, "its first tokens may come before the engine's answer"
        there.engine.open("commit")
        reply = await committing
        assert (reply.refusal, reply.runnable_ns) == (None, 7)
        assert there.announced == [KEY]
        record = there.requests.get(KEY)
        assert record is not None
        assert (list(record.output), record.base, record.end, record.came_from) == ([5], 1, 2, SOURCE)
        assert len(there.moves) == 0
        assert there.engine.calls == ["reserve", "commit"]

    run(scenario)


def test_a_schema_is_compiled_before_anything_is_promised() -> None:
    async def in_time(there: Destination) -> None:
        asking = there.reserve(json_schema="{}")
        await asyncio.sleep(0.1)
        assert (there.engine.calls, len(there.moves)) == (["learn {}"], 0)
        there.engine.open("learn")
        there.engine.open("reserve")
        assert (await asking).room is not None
        assert (await there.reserve(slots=64)).room is not None
        assert there.engine.calls == ["learn {}", "reserve", "reserve"]

    async def too_late(there: Destination) -> None:
        reply = await there.reserve(json_schema="{}")
        assert (reply.refusal, len(there.moves)) == (MoveRefusal.BUSY, 0)
        # Nothing was given up by that: it is tried again under the same name.
        there.engine.open("learn")
        there.engine.open("reserve")
        assert (await there.reserve(json_schema="{}")).room is not None

    async def given_up_meanwhile(there: Destination) -> None:
        asking = there.reserve(json_schema="{}")
        await asyncio.sleep(0.1)
        there.abort()
        there.engine.open("learn")
        assert (await asking).refusal is MoveRefusal.UNKNOWN
        assert there.engine.calls == ["learn {}"]

    async def refused(there: Destination) -> None:
        there.engine.open("learn", MoveRefused("no", Refusal.BROKEN))
        assert (await there.reserve(json_schema="{}")).refusal is MoveRefusal.BROKEN

    run(in_time)
    run(too_late)
    run(given_up_meanwhile)
    run(refused)


def test_a_commit_or_a_question_about_what_is_not_known() -> None:
    async def scenario(there: Destination) -> None:
        assert (await there.commit()).refusal is MoveRefusal.UNKNOWN
        assert (await there.reserve()).refusal is MoveRefusal.UNKNOWN

    async def asked(there: Destination) -> None:
        assert not (await there.question()).committed
        assert (await there.reserve()).refusal is MoveRefusal.UNKNOWN
        assert there.engine.calls == []

    run(scenario)
    run(asked)


def test_a_repeated_commit_gets_the_same_answer() -> None:
    async def scenario(there: Destination) -> None:
        first, second = await there.committing(), there.commit()
        await asyncio.sleep(0.1)
        there.engine.open("commit")
        assert (await first) == (await second) == (await there.commit())
        assert there.engine.calls.count("commit") == 1

    run(scenario)


def test_a_question_waits_for_the_engine() -> None:
    async def scenario(there: Destination) -> None:
        committing, asking = await there.committing(), there.question()
        await asyncio.sleep(0.1)
        assert not asking.done()
        there.engine.open("commit")
        assert (await asking).committed
        assert (await committing).refusal is None
        assert (await there.question()).committed

    run(scenario)


def test_a_commit_that_the_engine_refuses_is_refused_for_ever() -> None:
    async def scenario(there: Destination) -> None:
        committing, asking = await there.committing(), there.question()
        there.engine.open("commit", MoveRefused("bytes differ", Refusal.BROKEN))
        assert (await committing).refusal is MoveRefusal.BROKEN
        assert not (await asking).committed
        assert there.requests.get(KEY) is None
        assert (await there.commit()).refusal is MoveRefusal.BROKEN
        assert (await there.reserve()).refusal is MoveRefusal.UNKNOWN
        assert there.engine.calls == ["reserve", "commit", "abort"]
        assert there.announced == []

    run(scenario)


def test_an_engine_that_does_not_answer_a_commit() -> None:
    async def scenario(there: Destination) -> None:
        committing = await there.committing()
        reply = await committing
        assert reply.refusal is MoveRefusal.BROKEN
        # Whether it has it isn't known: it is told to end it, too.
        assert there.engine.calls == ["reserve", "commit", f"cancel {KEY}", "abort"]
        assert len(there.requests) == there.requests.running() == 0

    run(scenario)


def test_a_cancel_during_the_commit() -> None:
    async def scenario(there: Destination) -> None:
        committing = await there.committing()
        there.close(KEY)
        there.engine.open("commit")
        assert (await committing).refusal is None
        # Once when the engine didn't know it yet, and once when it did.
        assert there.engine.calls.count(f"cancel {KEY}") == 2
        assert there.announced == []

    run(scenario)


def test_a_cancel_during_a_commit_that_fails() -> None:
    async def scenario(there: Destination) -> None:
        committing = await there.committing()
        there.close(KEY)
        there.engine.open("commit", MoveRefused("no", Refusal.BROKEN))
        assert (await committing).refusal is MoveRefusal.BROKEN
        assert there.requests.running() == 0

    run(scenario)


def test_an_abort_during_the_commit() -> None:
    async def scenario(there: Destination) -> None:
        committing = await there.committing()
        there.abort()
        there.engine.open("commit")
        await committing
        assert there.engine.calls[-1] == f"cancel {KEY}"
        assert there.announced == []

    run(scenario)


def test_an_abort_after_the_commit() -> None:
    async def scenario(there: Destination) -> None:
        committing = await there.committing()
        there.engine.open("commit")
        await committing
        there.abort()
        assert there.engine.calls[-1] == f"cancel {KEY}"

    run(scenario)


def test_a_renewal_during_the_commit_comes_too_late() -> None:
    async def scenario(there: Destination) -> None:
        committing = await there.committing()
        assert (await there.reserve()).refusal is MoveRefusal.UNKNOWN
        there.engine.open("commit")
        await committing

    run(scenario)


@pytest.mark.parametrize("end", ["refused", "done"])
def test_a_renewal_that_is_answered_during_the_commit(end: str) -> None:
    async def scenario(there: Destination) -> None:
        await there.reserved()
        there.engine.gates["reserve"] = asyncio.get_running_loop().create_future()
        renewing = there.reserve()
        await asyncio.sleep(0.1)
        committing = there.commit()
        await asyncio.sleep(0.1)
        there.engine.open("reserve", MoveRefused("full", Refusal.NO_ROOM) if end == "refused" else None)
        await asyncio.sleep(0.1)
        assert (await renewing).room is None
        there.engine.open("commit")
        assert (await committing).refusal is None
        there.engine.gates["reserve"] = asyncio.get_running_loop().create_future()

    run(scenario)


@pytest.mark.parametrize("what", ["abort", "question", "commit"])
def test_what_comes_while_the_engine_makes_room(what: str) -> None:
    async def scenario(there: Destination) -> None:
        asking = there.reserve()
        await asyncio.sleep(0.1)
        if what == "abort":
            there.abort()
        elif what == "question":
            assert not (await there.question()).committed
        else:
            assert (await there.commit()).refusal is MoveRefusal.UNKNOWN
        there.engine.open("reserve")
        assert (await asking).refusal is MoveRefusal.UNKNOWN
        await asyncio.sleep(0.1)
        # Once at once, and once for the room that came afterwards.
        assert there.engine.calls == ["reserve", "abort", "abort"]
        assert (await there.commit()).refusal is MoveRefusal.UNKNOWN

    run(scenario)


def test_a_refusal_while_it_was_aborted() -> None:
    async def scenario(there: Destination) -> None:
        asking = there.reserve()
        await asyncio.sleep(0.1)
        there.abort()
        there.engine.open("reserve", MoveRefused("full", Refusal.NO_ROOM))
        assert (await asking).refusal is MoveRefusal.NO_ROOM

    run(scenario)


def test_a_refused_reservation_leaves_nothing() -> None:
    async def scenario(there: Destination) -> None:
        first, second = there.reserve(), there.reserve()
        await asyncio.sleep(0.1)
        assert there.engine.calls == ["reserve"], "once at a time"
        there.engine.open("reserve", MoveRefused("full", Refusal.NO_ROOM))
        assert (await first).refusal is MoveRefusal.NO_ROOM
        assert (await second).refusal is MoveRefusal.NO_ROOM
        assert len(there.moves) == 0
        there.engine.gates["reserve"] = asyncio.get_running_loop().create_future()
        await there.reserved()

    run(scenario)


def test_an_engine_that_makes_no_room_in_time() -> None:
    async def scenario(there: Destination) -> None:
        assert (await there.reserve()).refusal is MoveRefusal.BUSY
        assert len(there.moves) == 0
        await asyncio.sleep(0.1)
        assert there.engine.calls == ["reserve", "abort"]

    run(scenario)


def test_a_reservation_that_nobody_renews() -> None:
    async def scenario(there: Destination) -> None:
        await there.reserved()
        await asyncio.sleep(9.0)
        await there.reserved()
        await asyncio.sleep(9.0)
        assert len(there.moves) == 1
        await asyncio.sleep(2.0)
        assert len(there.moves) == 0
        assert there.engine.calls == ["reserve", "reserve", "abort"]
        assert (await there.commit()).refusal is MoveRefusal.UNKNOWN

    run(scenario)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"lease_s": 0.0}, MoveRefusal.STALE),
        ({"base": 3}, MoveRefusal.INCOMPATIBLE),
        ({"sampling": Sampling(max_new_tokens=8, logprobs=0)}, MoveRefusal.INCOMPATIBLE),
    ],
)
def test_commits_that_make_no_sense(changes: dict[str, Any], refusal: MoveRefusal) -> None:
    async def scenario(there: Destination) -> None:
        await there.reserved()
        assert (await there.commit(**changes)).refusal is refusal
        assert "commit" not in there.engine.calls
        assert len(there.requests) == 0

    run(scenario)


def test_log_probabilities_come_with_it() -> None:
    async def scenario(there: Destination) -> None:
        await there.reserved()
        there.engine.open("commit")
        known = Logprobs(0)
        known.append(-0.5, ())
        sampling = Sampling(max_new_tokens=8, logprobs=0)
        assert (await there.commit(sampling=sampling, logprobs=pack_logprobs(known))).refusal is None
        record = there.requests.get(KEY)
        assert record is not None
        assert record.logprobs == known

    run(scenario)


def test_a_newer_attempt_is_here_already() -> None:
    async def scenario(there: Destination) -> None:
        await there.reserved()
        newer = RequestRecord(KEY._replace(attempt=2, hop=0), FRONTEND, b"", Sampling(max_new_tokens=8), Priority(), 0)
        there.requests.enter(newer)
        assert (await there.commit()).refusal is MoveRefusal.STALE
        assert there.requests.get(newer.key) is newer

    run(scenario)


def test_an_older_attempt_gives_way() -> None:
    async def scenario(there: Destination) -> None:
        older = RequestRecord(KEY._replace(hop=0), FRONTEND, b"", Sampling(max_new_tokens=8), Priority(), 0)
        there.requests.enter(older)
        await there.reserved()
        there.engine.open("commit")
        assert (await there.commit()).refusal is None
        assert f"cancel {older.key}" in there.engine.calls

    run(scenario)


def test_whom_it_is_meant_for_and_from_whom() -> None:
    async def scenario(there: Destination) -> None:
        stranger = Owner("here", 2)
        message = MoveQuestion(**NAME | {"owner": stranger})
        with pytest.raises(Stale):
            await there.moves.on_question(message)
        there.moves.on_abort(MoveAbort(**NAME | {"owner": stranger}))
        await there.reserved()
        with pytest.raises(Stale):
            await there.moves.on_question(MoveQuestion(**NAME | {"source": Owner("other", 1)}))
        assert len(there.moves) == 1

    run(scenario)


def test_a_drain_gives_reservations_up_and_takes_no_more() -> None:
    async def scenario(there: Destination) -> None:
        await there.reserved()
        there.moves.refuse()
        assert (await there.commit()).refusal is MoveRefusal.DRAINING
        assert (await there.reserve()).refusal is MoveRefusal.DRAINING

    run(scenario)


def test_as_many_as_allowed() -> None:
    async def scenario(there: Destination) -> None:
        assert (await there.reserve()).refusal is MoveRefusal.BUSY

    run(scenario, moves_in_max=0)
    run(scenario, requests_max=1, moves_in_max=0)


def test_tombstones_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(there: Destination) -> None:
        there.abort()
        there.moves.expire(59.0)
        assert (await there.reserve()).refusal is MoveRefusal.UNKNOWN
        there.moves.expire(60.0)
        await there.reserved()
        monkeypatch.setattr(module, "TOMBSTONES_MAX", 2)
        for index in range(5):
            there.moves.on_abort(MoveAbort(**NAME | {"request_id": f"x{index}"}))
        assert len(there.moves._ended) == 2

    run(scenario)
