"""`meshift chat` against a scripted REST server."""

import io
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from meshift.services.cli import chat
from meshift.services.cli.errors import CommandError
from meshift.services.cli.main import main


def event(text: str | None) -> str:
    return "data: " + json.dumps({"choices": [{"delta": {"content": text}, "index": 0}]}) + "\n\n"


DONE = "data: [DONE]\n\n"


class Server(ThreadingHTTPServer):
    """Answers each completion with the next of `answers`; keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models = ["first", "second"]
        self.answers: list[tuple[int, str]] = []
        self.asked: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """The two paths that a chat uses."""

    server: Server

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self.answer(200, json.dumps({"data": [{"id": name} for name in self.server.models]}))

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.answer(*self.server.answers.pop(0))

    def answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002, the name of the base class
        """Quiet."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with Server() as server:
        monkeypatch.setenv("MESHIFT_URL", server.url)
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.005})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_one_answer(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.answers = [(200, ": a comment\n\n" + event(None) + event("Par") + event("is.") + DONE)]
    assert main(["chat", "Capital?", "--system", "Be brief.", "--max-tokens", "7", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "Paris.\n"
    assert server.asked == [
        {
            "model": "first",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Capital?"}],
            "stream": True,
            "max_tokens": 7,
            "temperature": 0.0,
        }
    ]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((404, '{"error": {"message": "model x is not served"}}'), "model x is not served"),
        ((502, "<html>bad gateway"), "HTTP 502: <html>bad gateway"),
        ((200, event("Par") + 'data: {"error": {"message": "no instance is left"}}\n\n'), "no instance is left"),
        ((200, event("Par")), "the answer broke off"),
    ],
)
def test_failures(server: Server, capsys: pytest.CaptureFixture[str], answer: tuple[int, str], said: str) -> None:
    server.answers = [answer]
    assert main(["chat", "Capital?", "--model", "x"]) == 1
    assert capsys.readouterr().err.rstrip("\n") == f"meshift chat: {said}"


def test_no_model(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.models = []
    assert main(["chat", "Capital?"]) == 1
    assert "serves no model yet" in capsys.readouterr().err


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "Capital?", "--url", "http://127.0.0.1:1"]) == 1
    assert "no mesh answers at http://127.0.0.1:1" in capsys.readouterr().err


def test_a_conversation_remembers(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    server.answers = [(200, event("1") + DONE), (200, event("2") + DONE)]
    assert main(["chat"]) == 0
    assert capsys.readouterr().out == "1\n2\n"
    assert [message["content"] for message in server.asked[1]["messages"]] == ["one", "1", "two"]


def test_a_failed_turn_is_forgotten(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation: chat.Conversation = []
    talk = chat.Chat(chat.ChatSettings(url=server.url), conversation)
    server.answers = [(429, "{}"), (200, event("ok") + DONE)]
    with pytest.raises(CommandError, match="HTTP 429"):
        talk.answer("one")
    assert conversation == []
    talk.answer("two")
    assert [message["content"] for message in conversation] == ["two", "ok"]


def test_a_script_ends_at_the_first_failure(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    server.answers = [(500, "{}")]
    assert main(["chat"]) == 1
    assert len(server.asked) == 1


def test_ctrl_c_stops_an_answer_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted:
        def answer(self, message: str) -> None:
            raise KeyboardInterrupt

    assert not chat.answered(Interrupted(), "one")  # type: ignore[arg-type]
    assert "[stopped]" in capsys.readouterr().err
