"""`meshift policy`, `decisions` and `explain`, against the real HTTP shell over a scripted core."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from meshift.schemas.errors import Unavailable
from meshift.services.cli import decisions, explain, policy
from meshift.services.cli.errors import CommandError
from meshift.services.cli.find import AdminClientSettings
from meshift.services.frontend.http import make_access
from meshift.services.frontend.text.tokenizer import ChatTokenizer
from tests.unit.frontend.http.harness import Shell, make_shell
from tests.unit.frontend.text.tiny_model import write_tiny_model

WHERE: dict[str, Any] = {"url": "http://mesh", "admin_key": SecretStr("sk-admin")}


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    folder = write_tiny_model(tmp_path / "tiny")
    access = make_access(["sk-client"], ["sk-admin"], insecure_no_keys=False)
    return make_shell(folder, ChatTokenizer.load(folder), access=access)


def transport(shell: Shell) -> httpx.ASGITransport:
    return httpx.ASGITransport(app=shell.app)


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ([], {}),
        (["set", "policy=llumnix"], {"policy": "llumnix"}),
        (
            ["set", "migration.out_below=5", "migration.enabled=false", "migration.in_above=null"],
            {"migration": {"out_below": 5, "enabled": False, "in_above": None}},
        ),
        (["set", "policy=infaas++"], {"policy": "infaas++"}),
    ],
)
def test_words_to_changes(words: list[str], changes: dict[str, Any]) -> None:
    assert policy.parse_changes(words) == changes


@pytest.mark.parametrize(
    "words", [["get"], ["set"], ["set", "policy"], ["set", ".a=1"], ["set", "a=1", "a=2"], ["set", "a=1", "a.b=2"]]
)
def test_other_words_are_refused(words: list[str]) -> None:
    with pytest.raises(CommandError):
        policy.parse_changes(words)


async def test_the_policy_is_shown_and_changed(shell: Shell) -> None:
    settings = AdminClientSettings(**WHERE)
    text = policy.render(await policy.ask(settings, {}, transport(shell)))
    assert "*" not in text
    assert any(line.split() == ["policy", "meshift"] for line in text.splitlines())
    text = policy.render(await policy.ask(settings, {"migration": {"out_below": 5}}, transport(shell)))
    assert any(line.split() == ["migration.out_below", "5.0", "*"] for line in text.splitlines())
    with pytest.raises(CommandError, match=r"scaling\.high.*nothing was changed"):
        await policy.ask(settings, {"scaling": {"high": "much"}}, transport(shell))
    shell.frontend.steering.error = Unavailable("no scheduler is there")
    with pytest.raises(CommandError, match="no scheduler is there"):
        await policy.ask(settings, {}, transport(shell))


async def test_decisions_are_told_in_words(shell: Shell) -> None:
    settings = decisions.DecisionsSettings(**WHERE, subject="dispatch")
    reply = await decisions.ask(settings, transport(shell))
    text = decisions.render(reply, alternatives=True)
    assert "1.5 s ago  dispatch chatcmpl-1/1 -> worker-1#1: freest" in text
    assert "worker-2#1: it drains (freeness none)" in text
    assert text.endswith("1 of 3 decisions of scheduler#4 are known")
    assert "it drains" not in decisions.render(reply, alternatives=False)


async def test_a_request_is_explained(shell: Shell) -> None:
    known = await explain.ask(explain.ExplainSettings(**WHERE, request="chatcmpl-1"), transport(shell))
    lines = explain.render(known, alternatives=True).splitlines()
    assert lines[0] == "chatcmpl-1: worker-1#1 has it"
    assert "worker-1#1: chosen (freeness 7)" in lines[2]
    assert lines[-1] == "no move of it is known"
    with pytest.raises(CommandError, match="nothing is known of request 'x'"):
        await explain.ask(explain.ExplainSettings(**WHERE, request="x"), transport(shell))
