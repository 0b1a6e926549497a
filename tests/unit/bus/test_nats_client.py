"""The short way through nats-py: cutting what the server sends, inlets, headers, and what goes the long way."""

import asyncio
import random
from typing import Any

import pytest
from nats.aio.client import Client
from nats.errors import ProtocolError

from meshift.services.bus import nats_client
from meshift.services.bus.nats_client import BusClient, Inlet, parse_headers
from meshift.services.bus.nats_parser import MessageParser

HEADERS = b"NATS/1.0\r\nk: v\r\n\r\n"


class Server:
    """A parser, and in `heard` all that reaches the client."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.parser = MessageParser(self, self._on_message)

    def _on_message(self, *message: Any) -> Any:
        self.heard.append(message)
        return self._later() if message[0] == 9 else None

    async def _later(self) -> None:
        await asyncio.sleep(0)
        self.heard.append("awaited")

    async def _process_ping(self) -> None:
        self.heard.append("ping")

    async def _process_info(self, info: Any) -> None:
        self.heard.append(info)

    async def _process_err(self, error: str) -> None:
        self.heard.append(error)
        self.parser.reset()


def message(number: int, payload: bytes, reply: str = "", headers: bytes = b"") -> tuple[bytes, Any]:
    """What the server sends, and what must be heard."""
    sizes = f"{len(headers)} {len(headers) + len(payload)}" if headers else f"{len(payload)}"
    line = f"{'HMSG' if headers else 'MSG'} a.b {number} {reply + ' ' if reply else ''}{sizes}\r\n"
    return line.encode() + headers + payload + b"\r\n", (number, b"a.b", reply.encode(), payload, headers or None)


@pytest.mark.parametrize("seed", range(5))
async def test_however_the_stream_is_cut_the_same_is_heard(seed: int) -> None:
    rng = random.Random(seed)
    parts = [
        message(1, b""),
        message(2, b"MSG a.b 1 3\r\nxyz\r\n"),
        (b"PING\r\n", "ping"),
        message(3, b"\r\n\r\n", reply="_INBOX.x.7"),
        message(4, bytes(rng.randbytes(5_000)), headers=HEADERS),
        (b'INFO {"a": 1}\r\n', {"a": 1}),
        message(5, b"", reply="r", headers=HEADERS),
    ]
    rng.shuffle(parts)
    stream = b"".join(sent for sent, _ in parts) * 3
    expected = [heard for _, heard in parts] * 3
    for size in (1, 2, 7, 4_096, len(stream)):
        server = Server()
        for at in range(0, len(stream), size):
            await server.parser.parse(stream[at : at + size])
        assert server.heard == expected, f"seed {seed}, pieces of {size}"


async def test_what_is_given_back_is_awaited_before_the_next() -> None:
    server = Server()
    await server.parser.parse(message(9, b"x")[0] + message(1, b"y")[0])
    assert [heard if isinstance(heard, str) else heard[0] for heard in server.heard] == [9, "awaited", 1]


async def test_a_large_message_in_pieces_is_looked_at_once() -> None:
    server = Server()
    sent, heard = message(1, bytes(4_000_000))
    for at in range(0, len(sent) - 1, 100_000):
        await server.parser.parse(sent[at : min(at + 100_000, len(sent) - 1)])
        assert server.parser._needed == len(sent)
    await server.parser.parse(sent[-1:] + sent[:10])
    assert server.heard == [heard]
    assert bytes(server.parser.buf) == sent[:10]


async def test_after_a_reset_nothing_of_the_old_connection_is_left() -> None:
    server = Server()
    await server.parser.parse(b"-ERR 'Stale Connection'\r\n" + message(1, b"old")[0])
    await server.parser.parse(message(1, b"new")[0])
    assert server.heard == ["'stale connection'", message(1, b"new")[1]]


@pytest.mark.parametrize(
    "line", [b"MSG\r\n", b"MSG a.b x 3\r\n", b"HMSG a.b 1 x 3\r\n", b"MSG a.b 1 y\r\n", b"HELLO\r\n"]
)
async def test_what_no_server_says(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        await Server().parser.parse(line)


# ---- inlets


def put(inlet: Inlet, payload: bytes) -> None:
    inlet.put(b"s", b"", payload, None)


async def test_an_inlet_drops_what_is_too_many_or_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_client, "INLET_BYTES_MAX", 100)
    got: list[bytes] = []
    drops: list[int] = []
    inlet = Inlet(lambda _s, _r, payload, _h: got.append(payload), 3, lambda: drops.append(1))
    for size in (50, 51, 50, 0, 0):
        put(inlet, bytes(size))
    assert (got, len(drops)) == ([], 2)
    await asyncio.sleep(0)
    assert [len(payload) for payload in got] == [50, 50, 0]
    put(inlet, bytes(100))
    await asyncio.sleep(0)
    assert len(got) == 4


async def test_an_inlet_gives_the_loop_turns_and_survives_its_receiver() -> None:
    got: list[bytes] = []

    def receive(_subject: bytes, _reply: bytes, payload: bytes, _headers: bytes | None) -> None:
        got.append(payload)
        if payload == b"1":
            raise RuntimeError

    failures: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    inlet = Inlet(receive, 10_000, lambda: None)
    for number in range(nats_client.TURN_MAX + 2):
        put(inlet, b"%d" % number)
    await asyncio.sleep(0)
    assert got == [b"0", b"1"]
    await asyncio.sleep(0)
    assert len(got) == nats_client.TURN_MAX + 2
    assert len(failures) == 1
    put(inlet, b"more")
    await asyncio.sleep(0)
    assert got[-1] == b"more"


# ---- sending


class Connected(BusClient):
    """A client that believes to be connected."""

    def __init__(self) -> None:
        super().__init__()
        self._status = Client.CONNECTED
        self.flushes = self._flush_queue = asyncio.Queue()
        self._flusher_task = asyncio.get_running_loop().create_task(asyncio.Event().wait())

    @property
    def sent(self) -> bytes:
        return b"".join(self._pending)


async def test_what_goes_out_comes_in() -> None:
    client, server = Connected(), Server()
    assert client.publish_now("a.b", b"payload", "r", {"traceparent": "00-1", "k": "ö"})
    assert client.publish_now("a.b", b"")
    assert client._pending_data_size == len(client.sent)
    assert client.flushes.qsize() == 1, "one call of the flusher does for both"
    await server.parser.parse(client.sent.replace(b"HPUB a.b", b"HMSG a.b 1").replace(b"PUB a.b", b"MSG a.b 1"))
    (_, _, reply, payload, headers), (_, _, no_reply, empty, no_headers) = server.heard
    assert (reply, payload, parse_headers(headers)) == (b"r", b"payload", {"traceparent": "00-1", "k": "ö"})
    assert (no_reply, empty, no_headers) == (b"", b"", None)


@pytest.mark.parametrize("headers", [{"a b": "c"}, {"": "c"}, {"a": "b\r\nc: d"}, {"a": "b\n"}, {"a:": "b"}])
async def test_headers_that_need_care_go_the_long_way(headers: dict[str, str]) -> None:
    client = Connected()
    assert not client.publish_now("a", b"", "", headers)
    assert client.sent == b""


async def test_without_a_connection_or_room_it_goes_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Connected()
    monkeypatch.setattr(nats_client, "SEND_BUFFER_BYTES_MAX", 100)
    assert client.publish_now("a", bytes(60))
    assert not client.publish_now("a", bytes(60))
    for status in (Client.RECONNECTING, Client.CLOSED, Client.DISCONNECTED):
        client._status = status
        assert not client.publish_now("a", b"")
    client._status = Client.CONNECTED
    assert client.publish_now("a", b"")
    assert client._flusher_task is not None
    client._flusher_task.cancel()
    await asyncio.wait([client._flusher_task])
    assert not client.publish_now("a", b"")
    assert not BusClient().publish_now("a", b"")


async def test_a_subscription_that_fails_leaves_no_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise OSError("refused")

    client = BusClient()
    monkeypatch.setattr(Client, "subscribe", fail)
    with pytest.raises(OSError, match="refused"):
        await client.subscribe_to("a", lambda *_: None)
    assert client._receivers == {}


@pytest.mark.parametrize(
    ("raw", "headers"),
    [
        (None, None),
        (b"", None),
        (b"NATS/1.0\r\n\r\n", {}),
        (b"NATS/1.0 503\r\n\r\n", {"Status": "503"}),
        (b"NATS/1.0 503 No Responders\r\nk:v\r\n\r\n", {"Status": "503", "k": "v"}),
        (b"NATS/1.0\r\nk:  a: b \r\nbad\r\nj: \xff\r\n\r\n", {"k": "a: b", "j": "�"}),
    ],
)
def test_headers(raw: bytes | None, headers: dict[str, str] | None) -> None:
    assert parse_headers(raw) == headers
