"""The project's own lint rules."""

import pytest

from scripts.lint_services import FILE_LINES_MAX, is_exempt, lint_length, lint_services

CLEAN = """
import asyncio
import random
from random import Random
from datetime import timedelta

async def wait(generator: random.Random, other: Random, time: float) -> float:
    now_s = asyncio.get_running_loop().time()
    await asyncio.wait([asyncio.ensure_future(asyncio.sleep(0))])
    await asyncio.wait_for(asyncio.sleep(generator.random()), time)
    return now_s + other.random() + timedelta(seconds=1).total_seconds()
"""


def test_clean_code_has_no_finding() -> None:
    assert lint_services(CLEAN, "x.py") == []


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("import time", "time"),
        ("import time as clock", "time"),
        ("from time import monotonic as now", "time.monotonic"),
        ("import datetime; datetime.datetime.now()", "datetime.datetime.now"),
        ("from datetime import datetime as day; day.utcnow()", "datetime.datetime.utcnow"),
        ("import random; random.shuffle([])", "random.shuffle"),
        ("import random as r; r.random()", "random.random"),
        ("from random import choice", "random.choice"),
        ("import random; random.SystemRandom()", "random.SystemRandom"),
        ("import secrets", "secrets"),
        ("import uuid; uuid.uuid4()", "uuid.uuid4"),
        ("import os; os.urandom(4)", "os.urandom"),
        ("import asyncio; asyncio.to_thread(print)", "asyncio.to_thread"),
        ("from asyncio import to_thread", "asyncio.to_thread"),
        ("import asyncio as aio; aio.TaskGroup()", "asyncio.TaskGroup"),
        ("from asyncio import TaskGroup", "asyncio.TaskGroup"),
        ("import asyncio\nasync def f(): done, _ = await asyncio.wait([])", "asyncio.wait"),
        ("from asyncio import wait", "asyncio.wait"),
        ("import asyncio; asyncio.all_tasks()", "asyncio.all_tasks"),
        ("import asyncio; asyncio.Task.all_tasks()", "all_tasks"),
        ("loop.run_in_executor(None, print)", "run_in_executor"),
        ("import threading; threading.Thread(target=print)", "threading.Thread"),
        ("import concurrent.futures", "concurrent"),
    ],
)
def test_findings(line: str, named: str) -> None:
    findings = lint_services("\n" + line + "\n", "services/x.py")
    assert len(findings) == 1
    assert findings[0].line == 2 + line.count("\n")
    assert named in findings[0].text


def test_each_offence_is_named() -> None:
    source = "import time\nimport random\nx = time.time()\ny = random.random()\n"
    assert [finding.line for finding in lint_services(source, "x.py")] == [1, 4]


def test_length() -> None:
    assert lint_length("x\n" * FILE_LINES_MAX, "x.py") == []
    (finding,) = lint_length("x\n" * (FILE_LINES_MAX + 1), "x.py")
    assert (
        str(finding) == f"x.py:{FILE_LINES_MAX + 1}: {FILE_LINES_MAX + 1} lines, more than {FILE_LINES_MAX}: split it"
    )


@pytest.mark.parametrize(
    ("path", "exempt"),
    [
        ("services/frontend/http/server.py", True),
        ("services/frontend/core.py", False),
        ("services/cli/up.py", True),
        ("services/launcher/child.py", True),
        ("services/worker/main.py", True),
        ("services/worker/core.py", False),
        ("services/process.py", True),
    ],
)
def test_exemptions(path: str, exempt: bool) -> None:
    assert is_exempt(path) is exempt
