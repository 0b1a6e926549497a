"""Cuts what a NATS server sends into messages, many at a time; what else it says is left to nats-py's parser.

nats-py's own matches a regular expression at each message and removes each from the front of its buffer, which is a
third of what it costs to receive one.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Final

from meshift.services.bus.nats_library import Parser, errors

OnMessage = Callable[[int, bytes, bytes, bytes, bytes | None], Awaitable[None] | None]
"""Takes the subscription's number, subject, reply subject, payload and headers; an awaitable is awaited."""

_LINE_END: Final = b"\r\n"
_MESSAGE: Final = b"M"[0]
_MESSAGE_WITH_HEADERS: Final = b"H"[0]


class MessageParser(Parser):
    """Takes the place of nats-py's `Parser` in a client."""

    def __init__(self, client: Any, on_message: OnMessage) -> None:
        self._on_message = on_message
        self._others = Parser(client)
        super().__init__(client)

    def reset(self) -> None:
        """Forget what has come: a new connection begins."""
        super().reset()
        self._others.reset()
        self._needed = 0
        """Bytes of the buffer's first message, as far as known: with fewer, nothing in it is whole."""

    async def parse(self, data: bytes = b"") -> None:
        """Hand on what is whole, and keep the rest. Raises ProtocolError."""
        buffer = self.buf
        buffer += data
        if len(buffer) < self._needed:
            return
        self._needed = position = 0
        # Slices of `bytes` are copied once, those of a `bytearray` twice.
        received = bytes(buffer)
        while (end := received.find(_LINE_END, position)) >= 0:
            begin, later = end + len(_LINE_END), None
            if received[position] == _MESSAGE or received[position] == _MESSAGE_WITH_HEADERS:
                number, subject, reply, header_size, size = _first_line(received[position:end])
                stop, body = begin + size, begin + header_size
                if stop + len(_LINE_END) > len(received):
                    self._needed = stop + len(_LINE_END) - position
                    break
                headers = received[begin:body] if header_size else None
                later = self._on_message(number, subject, reply, received[body:stop], headers)
                position = stop + len(_LINE_END)
            else:
                later = self._others.parse(received[position:begin])
                position = begin
            if later is not None:
                await later
                if self.buf is not buffer:
                    return
        del buffer[:position]


def _first_line(line: bytes) -> tuple[int, bytes, bytes, int, int]:
    """Number of the subscription, subject, reply subject, size of the headers, size of headers and payload."""
    words = line.split()
    try:
        if words[0] == b"MSG":
            return int(words[2]), words[1], words[3] if len(words) == 5 else b"", 0, int(words[-1])
        return int(words[2]), words[1], words[3] if len(words) == 6 else b"", int(words[-2]), int(words[-1])
    except (IndexError, ValueError):
        raise errors.ProtocolError(f"nats: malformed message: {line[:64]!r}") from None
