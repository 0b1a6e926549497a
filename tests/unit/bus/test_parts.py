"""The parts that both buses are made of, where the contract suite doesn't reach."""

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVarTuple

import pytest
from nats.aio.client import Client

from meshift.schemas.base import Message
from meshift.schemas.errors import (
    BusClosed,
    ErrorReply,
    InvalidRequest,
    MessageTooLarge,
    Overloaded,
    PeerGone,
    PeerTimeout,
)
from meshift.schemas.identity import Owner
from meshift.schemas.limits import PAYLOAD_BYTES_MAX
from meshift.schemas.requests import ReplayReply, ReplayState, SubmitReply
from meshift.services.bus.codec import SharedDecoder, check_packed_size, decode, encode
from meshift.services.bus.delay_line import DelayLine
from meshift.services.bus.logs import INTERVAL_S, KEYS_MAX, QuietLog
from meshift.services.bus.nats_answers import ERROR_TEXT_CHARS_MAX, check_wire_size, encode_answer, header_size
from meshift.services.bus.nats_outbox import Outbox, Outgoing
from meshift.services.bus.pending import PendingRequests
from meshift.services.bus.tasks import AnswerTasks, end_task
from meshift.services.simulation import virtual_time

ArgumentTs = TypeVarTuple("ArgumentTs")

OWNER = Owner("w1", 1)


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in virtual time."""

    @functools.wraps(test)
    def run_test(*args: Any, **kwargs: Any) -> None:
        virtual_time.run(test(*args, **kwargs))

    return run_test


# Codec


def test_a_payload_is_validated_once_for_all_its_receivers_of_one_type() -> None:
    decoder = SharedDecoder()
    first, second = (encode(SubmitReply(owner=Owner("w", number))) for number in (1, 2))
    message = decoder.decode(SubmitReply, first)
    assert decoder.decode(SubmitReply, first) is message
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            decoder.decode(ReplayReply, first)
    assert decoder.decode(SubmitReply, first) == message
    assert decoder.decode(SubmitReply, second).owner == Owner("w", 2)
    assert decoder.decode(SubmitReply, bytes(bytearray(second))).owner == Owner("w", 2)


# Tasks


@in_virtual_time
async def test_a_task_that_loses_a_cancellation_is_cancelled_again() -> None:
    lost: list[int] = []

    async def stubborn() -> None:
        while len(lost) < 2:
            try:
                await asyncio.sleep(1_000)
            except asyncio.CancelledError:
                lost.append(1)
        await asyncio.sleep(1_000)

    task = asyncio.ensure_future(stubborn())
    await asyncio.sleep(0)
    await end_task(task)
    assert task.cancelled()
    assert len(lost) == 2


@in_virtual_time
async def test_a_task_that_fails_while_it_ends_is_ended() -> None:
    async def fail() -> None:
        raise KeyError("x")

    task = asyncio.ensure_future(fail())
    await end_task(task)
    assert task.done()


@in_virtual_time
async def test_answers_are_waited_for_and_then_cancelled_in_order() -> None:
    ended: list[str] = []
    tasks = AnswerTasks()

    async def work(name: str, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
            ended.append(f"{name} done")
        except asyncio.CancelledError:
            ended.append(f"{name} cancelled")
            raise

    for name, seconds in (("a", 9.0), ("b", 1.0), ("c", 8.0)):
        tasks.spawn(work(name, seconds))
    await tasks.finish(2.0)
    assert ended == ["b done", "a cancelled", "c cancelled"]
    await tasks.finish(2.0)
    assert asyncio.get_running_loop().time() == 2.0


# Pending requests


@in_virtual_time
async def test_pending_requests() -> None:
    pending: PendingRequests[str] = PendingRequests(4)
    opened = [pending.open("x", timeout_s) for timeout_s in (1.0, 1.0, 1.0, 5.0)]
    with pytest.raises(Overloaded):
        pending.open("x", 1.0)
    (answered, _), (gone, _), (late, _), (waiting, _) = opened
    pending.resolve(answered, "first")
    pending.resolve(answered, "second")
    pending.gone(gone)
    pending.fail(gone, Overloaded("too late to matter"))
    await asyncio.sleep(2.0)
    pending.resolve(late, "too late")
    pending.close()
    assert await opened[0][1] == "first"
    for (_, future), error_type in zip(opened[1:], (PeerGone, PeerTimeout, BusClosed), strict=True):
        with pytest.raises(error_type):
            await future
    for token, _ in opened:
        assert token in pending
        pending.discard(token)
        pending.discard(token)
    assert len(pending) == 0
    for forget in (pending.gone, functools.partial(pending.resolve, answer="x")):
        forget(waiting)


# Logs


@in_virtual_time
async def test_a_storm_is_one_line_a_second(caplog: pytest.LogCaptureFixture) -> None:
    log = QuietLog(logging.getLogger("test"), "me")
    for _ in range(5):
        log.report("a", "bad")
    log.report("b", "worse", KeyError("the cause"))
    await asyncio.sleep(INTERVAL_S)
    log.report("a", "bad")
    assert [record.message for record in caplog.records] == [
        "bus client me: bad",
        "bus client me: worse",
        "bus client me: bad (4 like it left out)",
    ]
    assert "the cause" in caplog.text


@in_virtual_time
async def test_the_log_doesn_t_remember_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    log = QuietLog(logging.getLogger("test"), "me")
    for number in range(KEYS_MAX + 1):
        log.report(number, "bad")
    log.report(0, "bad")
    assert len(caplog.records) == KEYS_MAX + 2


# Sizes


@pytest.mark.parametrize("tokens", [0, PAYLOAD_BYTES_MAX * 3 // 16 - 256, PAYLOAD_BYTES_MAX * 3 // 16 + 4])
def test_the_cheap_size_check_refuses_nothing_that_fits(tokens: int) -> None:
    message = ReplayReply(owner=OWNER, state=ReplayState.RUNNING, tokens=bytes(4 * tokens))
    try:
        encode(message)
    except MessageTooLarge:
        with pytest.raises(MessageTooLarge):
            check_packed_size(message)
    else:
        check_packed_size(message)


@pytest.mark.parametrize(
    ("headers", "wire"),
    [(None, b""), ({}, b""), ({"a": "b", "key": "ü"}, "NATS/1.0\r\na: b\r\nkey: ü\r\n\r\n".encode())],
)
def test_header_sizes(headers: dict[str, str] | None, wire: bytes) -> None:
    assert header_size(headers) == len(wire)
    check_wire_size(b"12345", headers, len(wire) + 5)
    check_wire_size(b"12345", headers, None)
    with pytest.raises(MessageTooLarge):
        check_wire_size(b"12345", headers, len(wire) + 4)


def test_answers_on_the_wire() -> None:
    good = SubmitReply(owner=OWNER)
    assert encode_answer(good, None) == (encode(good), None)
    payload, headers = encode_answer(good, 10)
    assert decode(ErrorReply, payload).to_exception().code is MessageTooLarge.code
    assert headers is not None
    assert headers["Nats-Service-Error-Code"] == "413"
    payload, headers = encode_answer(ErrorReply.of(PeerGone("x" * 1_000)), None)
    assert decode(ErrorReply, payload).message == "x" * 1_000
    assert headers is not None
    assert headers["Nats-Service-Error"] == "x" * ERROR_TEXT_CHARS_MAX


# The outbox


@in_virtual_time
async def test_the_outbox_is_bounded_in_messages_and_bytes_and_keeps_order() -> None:
    outbox = Outbox(messages_max=3, bytes_max=10)

    async def action(client: Client) -> None:
        raise AssertionError("only queued here")

    assert outbox.empty
    first, second = Outgoing("a", b"1234", None), Outgoing("b", b"1234", None)
    outbox.put(first)
    outbox.put_action(action)
    outbox.put(second)
    with pytest.raises(Overloaded):
        outbox.put(Outgoing("c", b"123", None))
    outbox.put(Outgoing("d", b"12", None))
    with pytest.raises(Overloaded):
        outbox.put(Outgoing("e", b"", None))
    seen: list[object] = []
    while not outbox.empty:
        seen.append(await outbox.head())
        outbox.done()
    assert seen[:3] == [first, action, second]
    outbox.put(Outgoing("f", bytes(10), None))
    waiting = asyncio.ensure_future(Outbox(1, 1).head())
    await asyncio.sleep(1)
    assert not waiting.done()
    waiting.cancel()


# The delay line


class EarlyLoop(asyncio.SelectorEventLoop):
    """Its timers ring a little before their time, as those of a loop with a coarse clock may."""

    def call_at(
        self,
        when: float,
        callback: Callable[[*ArgumentTs], object],
        *args: *ArgumentTs,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return super().call_at(when - 0.002, callback, *args, context=context)


def test_a_timer_that_rings_early_delivers_nothing_early() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        line = DelayLine(5_000_000)
        line.bind(loop)
        done = asyncio.Event()
        began = loop.time()
        ended: list[None] = []
        line.call(0, ended.append, None)
        line.call(1_000_000, done.set)
        async with asyncio.timeout(5):
            await done.wait()
        assert loop.time() - began >= 0.006 - 1e-6
        assert ended == [None]

    with asyncio.Runner(loop_factory=EarlyLoop) as runner:
        runner.run(main())


@in_virtual_time
async def test_usual_and_other_delays_merge_in_order_of_time_then_of_call() -> None:
    line = DelayLine(10)
    line.bind(asyncio.get_running_loop())
    seen: list[str] = []
    line.call(5, seen.append, "late")
    line.call(0, seen.append, "usual")
    line.call(5, seen.append, "late too")
    await asyncio.sleep(5e-9)
    line.call(0, seen.append, "usual at the same time as the late ones, called after them")
    line.call(1, seen.append, "last")
    await asyncio.sleep(1)
    assert seen == [
        "usual", "late", "late too", "usual at the same time as the late ones, called after them", "last",
    ]  # fmt: skip


@in_virtual_time
async def test_an_error_in_a_call_doesn_t_stop_the_line() -> None:
    loop = asyncio.get_running_loop()
    errors: list[Any] = []
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
    line = DelayLine(10)
    line.bind(loop)
    seen: list[Message | str] = []

    def fail() -> None:
        raise ZeroDivisionError

    line.call(0, fail)
    line.call(0, seen.append, "next")
    await asyncio.sleep(1)
    assert seen == ["next"]
    assert [type(error) for error in errors] == [ZeroDivisionError]
