"""`meshift memory`, against the real HTTP shell over scripted operators."""

from pathlib import Path

import httpx
import pytest

from meshift.services.cli import memory
from meshift.services.cli.errors import CommandError
from meshift.services.frontend.http import make_access
from meshift.services.frontend.text.tokenizer import ChatTokenizer
from tests.unit.frontend.fake_frontend import memory_reply
from tests.unit.frontend.http.harness import Shell, make_shell
from tests.unit.frontend.text.tiny_model import write_tiny_model

ADMIN = "sk-admin"


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    folder = write_tiny_model(tmp_path / "tiny")
    access = make_access(["sk-client"], [ADMIN], insecure_no_keys=False)
    return make_shell(folder, ChatTokenizer.load(folder), access=access)


def settings(shell: Shell, **more: object) -> memory.MemorySettings:
    name = shell.frontend.operators.known[0].load.owner.instance_id
    fields = {"url": "http://mesh", "admin_key": ADMIN, "instance": name}
    return memory.MemorySettings.model_validate(fields | more)


async def test_what_there_is(shell: Shell) -> None:
    asked = settings(shell)
    answer = await memory.ask(asked, httpx.ASGITransport(app=shell.app))
    assert answer == memory_reply(asked.instance, 1024)
    with pytest.raises(CommandError, match="there is no instance 'nobody'"):
        await memory.ask(settings(shell, instance="nobody"), httpx.ASGITransport(app=shell.app))


def test_units_in_words() -> None:
    assert memory.describe(memory_reply("worker-1", 1024)).splitlines() == [
        "worker-1#1: 1024 tokens = 0 used + 0 cached + 1024 free + 0 reserved",
        "pages     64 of 16 tokens; a request has 1020 tokens at most",
        "groups    8 of 4 layers, the last of 2",
        "units     520 of 1032 committed, 98304 bytes each: 51118080 bytes (48.8 MiB)",
        "waste     0 bytes a unit, 49152 in the last group's: 3194880 bytes (3.0 MiB) now",
        "resident  5242880 bytes (5.0 MiB)",
    ]


def test_one_slab_in_words() -> None:
    slab = memory_reply("w", 32).model_copy(update={"units": None, "resident_bytes": None, "page_tokens": 1})
    lines = memory.describe(slab).splitlines()
    assert len(lines) == 3
    assert "2 of 1 token;" in lines[1]
    assert "one slab, shared out token by token" in lines[2]


async def test_a_new_capacity(shell: Shell) -> None:
    answer = await memory.ask(settings(shell, capacity=640), httpx.ASGITransport(app=shell.app))
    assert memory.describe_resize(answer).splitlines() == [
        f"{answer.owner}: 640 tokens; 32 tokens of cached prefixes and 1 requests went, "
        "3.0 MiB given back, 5.0 MiB held",
        "not what was asked for: requests hold the rest",
    ]
