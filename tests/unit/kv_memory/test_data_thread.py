"""DataThread over real sockets: order, back-pressure, quiet, and its end."""

import asyncio
import queue
import threading
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from meshift.kv_memory.data_thread import CHECKSUM_LATER, DataThread
from meshift.kv_memory.rectangle import Rectangle
from meshift.kv_memory.transport.base import Address, Patch, PatchHandler, TransportError
from meshift.kv_memory.transport.limits import TransportLimits
from meshift.kv_memory.transport.tcp import TcpTransport
from tests.contract.transport_suite import Inbox

TIMEOUT_S = 10.0


def patch(payload: bytes = b"rows", *, transfer_id: str = "move", watermark: int = 1) -> Patch:
    return Patch(transfer_id, watermark, 0, Rectangle(0, 1, 0, watermark, 0, 1), payload, CHECKSUM_LATER)


class Done:
    """An `on_done` that can be waited for."""

    def __init__(self) -> None:
        self._results: queue.SimpleQueue[TransportError | None] = queue.SimpleQueue()
        self.threads: set[str] = set()

    def __call__(self, error: TransportError | None) -> None:
        self.threads.add(threading.current_thread().name)
        self._results.put(error)

    def wait(self) -> TransportError | None:
        return self._results.get(timeout=TIMEOUT_S)

    @property
    def called(self) -> bool:
        return not self._results.empty()


@contextmanager
def running(**options: Any) -> Iterator[DataThread]:
    limits = options.pop("limits", TransportLimits())
    thread = DataThread(lambda: TcpTransport(limits=limits), **options)
    thread.start(timeout_s=TIMEOUT_S)
    try:
        yield thread
    finally:
        assert thread.close(timeout_s=TIMEOUT_S)


@pytest.fixture
def ends() -> Iterator[tuple[DataThread, DataThread]]:
    with ExitStack() as stack:
        yield stack.enter_context(running(name="out")), stack.enter_context(running(name="in"))


class Blocking:
    """A handler that waits until it may go on."""

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self.left = False

    def __call__(self, patch: Patch) -> None:
        self.entered.set()
        assert self.go.wait(TIMEOUT_S)
        self.left = True


# ---- sending ----


def test_a_posted_patch_is_applied_and_its_callback_comes_on_the_data_thread(
    ends: tuple[DataThread, DataThread],
) -> None:
    out, into = ends
    inbox, done = Inbox(), Done()
    out.post(into.open_transfer("move", inbox), patch(b"x" * 100_000), TIMEOUT_S, done)
    assert done.wait() is None
    assert inbox.patches[0].payload == b"x" * 100_000
    assert inbox.patches[0].checksum == zlib.crc32(b"x" * 100_000)
    assert done.threads == {"out"}


def test_patches_are_applied_in_the_order_of_the_posts(ends: tuple[DataThread, DataThread]) -> None:
    out, into = ends
    inbox = Inbox()
    address = into.open_transfer("move", inbox)
    dones = [Done() for _ in range(50)]
    for watermark, done in enumerate(dones, 1):
        out.post(address, patch(bytes(70_000 * (watermark % 2)), watermark=watermark), TIMEOUT_S, done)
    assert [done.wait() for done in dones] == [None] * 50
    assert inbox.watermarks == list(range(1, 51))


def test_a_wrong_checksum_of_the_caller_is_not_mended(ends: tuple[DataThread, DataThread]) -> None:
    out, into = ends
    done = Done()
    bad = Patch("move", 1, 0, Rectangle(0, 1, 0, 1, 0, 1), b"rows", 7)
    out.post(into.open_transfer("move", Inbox()), bad, TIMEOUT_S, done)
    assert "checksum" in str(done.wait())


def test_a_failure_reaches_every_later_post_of_the_transfer(ends: tuple[DataThread, DataThread]) -> None:
    out, into = ends

    def handler(patch: Patch) -> None:
        raise RuntimeError("no slots")

    address = into.open_transfer("move", handler)
    first, second = Done(), Done()
    out.post(address, patch(), TIMEOUT_S, first)
    assert "no slots" in str(first.wait())
    out.post(address, patch(), TIMEOUT_S, second)
    assert "broken" in str(second.wait())
    assert out.posts == 0


def test_a_frozen_receiver_fails_posts_by_their_deadline(ends: tuple[DataThread, DataThread]) -> None:
    out, into = ends
    handler, done = Blocking(), Done()
    address = into.open_transfer("move", handler)
    out.post(address, patch(), 0.05, done)
    assert "no answer within" in str(done.wait())
    handler.go.set()


def test_posting_does_not_wait_for_anything() -> None:
    with running() as out, running() as into:
        handler, dones = Blocking(), [Done() for _ in range(20)]
        address = into.open_transfer("move", handler)
        for done in dones:
            out.post(address, patch(bytes(1 << 20)), TIMEOUT_S, done)
        assert handler.entered.wait(TIMEOUT_S)
        assert not any(done.called for done in dones)
        handler.go.set()
        assert [done.wait() for done in dones] == [None] * 20


def test_posts_are_bounded() -> None:
    with running(posts_max=2) as out, running() as into:
        handler, dones = Blocking(), [Done(), Done(), Done()]
        address = into.open_transfer("move", handler)
        for done in dones[:2]:
            out.post(address, patch(), TIMEOUT_S, done)
        with pytest.raises(TransportError, match="2 patches"):
            out.post(address, patch(), TIMEOUT_S, dones[2])
        handler.go.set()
        assert [done.wait() for done in dones[:2]] == [None, None]
        assert not dones[2].called
        out.post(address, patch(), TIMEOUT_S, dones[2])
        assert dones[2].wait() is None


def test_a_callback_that_fails_harms_nobody(
    ends: tuple[DataThread, DataThread], caplog: pytest.LogCaptureFixture
) -> None:
    out, into = ends
    address = into.open_transfer("move", Inbox())

    def fail(error: TransportError | None) -> None:
        raise RuntimeError("callback")

    done = Done()
    out.post(address, patch(), TIMEOUT_S, fail)
    out.post(address, patch(), TIMEOUT_S, done)
    assert done.wait() is None
    assert "callback" in caplog.text


def test_opening_twice(ends: tuple[DataThread, DataThread]) -> None:
    _, into = ends
    into.open_transfer("move", Inbox())
    with pytest.raises(ValueError, match="move"):
        into.open_transfer("move", Inbox())


# ---- quiet ----


def test_quiet_comes_after_the_running_handler(ends: tuple[DataThread, DataThread]) -> None:
    out, into = ends
    handler, done, quiet = Blocking(), Done(), threading.Event()
    seen: list[bool] = []

    def on_quiet() -> None:
        seen.append(handler.left)
        quiet.set()

    address = into.open_transfer("move", handler)
    out.post(address, patch(), TIMEOUT_S, done)
    assert handler.entered.wait(TIMEOUT_S)
    into.quiesce("move", on_quiet)
    assert not quiet.is_set()
    handler.go.set()
    assert quiet.wait(TIMEOUT_S)
    assert seen == [True]
    later = Done()
    out.post(address, patch(), TIMEOUT_S, later)
    assert isinstance(later.wait(), TransportError)


def test_quiet_comes_after_the_callbacks_of_its_posts(ends: tuple[DataThread, DataThread]) -> None:
    out, into = ends
    handler, quiet = Blocking(), threading.Event()
    order: list[str] = []
    address = into.open_transfer("move", handler)
    other = into.open_transfer("other", Inbox())
    for name in ("first", "second"):
        out.post(address, patch(bytes(1 << 20)), TIMEOUT_S, lambda error, name=name: order.append(f"{name} {error}"))  # type: ignore[misc]
    assert handler.entered.wait(TIMEOUT_S)
    kept = Done()
    out.post(other, patch(transfer_id="other"), TIMEOUT_S, kept)
    out.quiesce("move", lambda: (order.append("quiet"), quiet.set())[0])  # type: ignore[func-returns-value]
    assert quiet.wait(TIMEOUT_S)
    assert [entry.split(" ", 1)[0] for entry in order] == ["first", "second", "quiet"]
    assert all("given up" in entry or "broken" in entry for entry in order[:2])
    handler.go.set()
    assert kept.wait() is None, "other transfers go on"


def test_posts_that_were_not_begun_are_quiesced_too(ends: tuple[DataThread, DataThread]) -> None:
    out, into = ends
    handler, quiet = Blocking(), threading.Event()
    blocked = out.open_transfer("blocks out", handler)
    into.post(blocked, patch(transfer_id="blocks out"), TIMEOUT_S, Done())
    assert handler.entered.wait(TIMEOUT_S)
    inbox, done = Inbox(), Done()
    out.post(into.open_transfer("move", inbox), patch(), TIMEOUT_S, done)
    out.quiesce("move", quiet.set)
    handler.go.set()
    assert quiet.wait(TIMEOUT_S)
    assert "given up" in str(done.wait())
    assert inbox.patches == []


def test_an_unknown_transfer_is_quiet(ends: tuple[DataThread, DataThread]) -> None:
    quiet = threading.Event()
    ends[0].quiesce("never heard of", quiet.set)
    assert quiet.wait(TIMEOUT_S)


def test_a_transfer_can_be_opened_again_after_quiet(ends: tuple[DataThread, DataThread]) -> None:
    out, into = ends
    quiet, done, inbox = threading.Event(), Done(), Inbox()
    into.open_transfer("move", Inbox())
    into.quiesce("move", quiet.set)
    assert quiet.wait(TIMEOUT_S)
    out.post(into.open_transfer("move", inbox), patch(), TIMEOUT_S, done)
    assert done.wait() is None
    assert inbox.watermarks == [1]


# ---- its life ----


def test_close_fails_what_is_posted() -> None:
    with running() as into:
        out = DataThread(TcpTransport)
        out.start(timeout_s=TIMEOUT_S)
        handler, dones = Blocking(), [Done(), Done()]
        address = into.open_transfer("move", handler)
        for done in dones:
            out.post(address, patch(), TIMEOUT_S, done)
        assert handler.entered.wait(TIMEOUT_S)
        assert out.close(timeout_s=TIMEOUT_S)
        assert all(isinstance(done.wait(), TransportError) for done in dones)
        assert (out.running, out.posts) == (False, 0)
        handler.go.set()


def test_after_close_everything_is_refused_and_quiet() -> None:
    thread = DataThread(TcpTransport)
    thread.start(timeout_s=TIMEOUT_S)
    address = thread.open_transfer("move", Inbox())
    assert thread.close(timeout_s=TIMEOUT_S)
    assert thread.close(timeout_s=TIMEOUT_S)
    with pytest.raises(TransportError):
        thread.post(address, patch(), TIMEOUT_S, Done())
    with pytest.raises(TransportError):
        thread.open_transfer("move", Inbox())
    quiet = threading.Event()
    thread.quiesce("move", quiet.set)
    assert quiet.is_set()


def test_before_the_start() -> None:
    thread = DataThread(TcpTransport)
    with pytest.raises(TransportError):
        thread.post(Address("tcp", "127.0.0.1:1"), patch(), TIMEOUT_S, Done())
    quiet = threading.Event()
    thread.quiesce("move", quiet.set)
    assert quiet.is_set()
    assert thread.close(timeout_s=TIMEOUT_S)


def test_a_transport_that_cannot_start() -> None:
    with running() as first:
        port = int(first.open_transfer("move", Inbox()).location.rsplit(":")[1])
        thread = DataThread(lambda: TcpTransport(port=port))
        with pytest.raises(TransportError, match="can't listen"):
            thread.start(timeout_s=TIMEOUT_S)
        assert thread.close(timeout_s=TIMEOUT_S)


class HangingTransport:
    """Starts when it may; every send takes for ever."""

    def __init__(self, go: threading.Event) -> None:
        self._go = go

    async def start(self) -> None:
        await asyncio.to_thread(self._go.wait, TIMEOUT_S)

    async def close(self) -> None: ...

    def open_transfer(self, transfer_id: str, handler: PatchHandler) -> Address:
        raise NotImplementedError

    def close_transfer(self, transfer_id: str) -> None: ...

    async def send(self, address: Address, patch: Patch, *, timeout_s: float) -> None:
        await asyncio.get_running_loop().create_future()


def test_a_start_that_takes_too_long() -> None:
    go = threading.Event()
    thread = DataThread(lambda: HangingTransport(go))
    with pytest.raises(TransportError, match="didn't start"):
        thread.start(timeout_s=0.01)
    quiet = threading.Event()
    thread.quiesce("move", quiet.set)
    assert not thread.close(timeout_s=0.01)
    go.set()
    assert thread.close(timeout_s=TIMEOUT_S)
    assert quiet.is_set()


def test_close_says_when_a_handler_hangs() -> None:
    with running() as out:
        into = DataThread(TcpTransport)
        into.start(timeout_s=TIMEOUT_S)
        handler, quiet = Blocking(), threading.Event()
        out.post(into.open_transfer("move", handler), patch(), TIMEOUT_S, Done())
        assert handler.entered.wait(TIMEOUT_S)
        assert not into.close(timeout_s=0.01)
        into.quiesce("move", quiet.set)
        assert not quiet.is_set(), "its memory is still in use"
        handler.go.set()
        assert into.close(timeout_s=TIMEOUT_S)
        assert quiet.is_set()


def test_a_loop_that_fails_tells_everybody(caplog: pytest.LogCaptureFixture) -> None:
    go = threading.Event()
    go.set()
    thread = DataThread(lambda: HangingTransport(go))
    thread.start(timeout_s=TIMEOUT_S)
    done = Done()
    thread.post(Address("tcp", "x"), patch(), TIMEOUT_S, done)

    def exit_loop() -> None:
        raise SystemExit

    thread.quiesce("other", exit_loop)
    assert isinstance(done.wait(), TransportError)
    assert thread.close(timeout_s=TIMEOUT_S)
    with pytest.raises(TransportError):
        thread.post(Address("tcp", "x"), patch(), TIMEOUT_S, Done())


class BuggyTransport(HangingTransport):
    async def send(self, address: Address, patch: Patch, *, timeout_s: float) -> None:
        raise KeyError("a bug")


def test_whatever_a_send_raises_arrives_as_a_transport_error(caplog: pytest.LogCaptureFixture) -> None:
    go = threading.Event()
    go.set()
    thread = DataThread(lambda: BuggyTransport(go))
    thread.start(timeout_s=TIMEOUT_S)
    done = Done()
    thread.post(Address("tcp", "x"), patch(), TIMEOUT_S, done)
    assert "a bug" in str(done.wait())
    assert thread.close(timeout_s=TIMEOUT_S)
    assert "a send failed" in caplog.text


def test_many_threads_post() -> None:
    with running() as out, running() as into:
        inboxes = {f"move-{index}": Inbox() for index in range(4)}
        dones: list[Done] = []

        def post(name: str, address: Address) -> None:
            for watermark in range(1, 101):
                done = Done()
                dones.append(done)
                out.post(address, patch(transfer_id=name, watermark=watermark), TIMEOUT_S, done)

        threads = [
            threading.Thread(target=post, args=(name, into.open_transfer(name, inbox)))
            for name, inbox in inboxes.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert [done.wait() for done in dones] == [None] * 400
        assert all(inbox.watermarks == list(range(1, 101)) for inbox in inboxes.values())
