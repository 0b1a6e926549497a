"""The operators' commands, against the real HTTP shell over scripted operators."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from meshift.schemas.admin import DrainBody, InstanceList, InstanceStatus, MoveBody, MoveList, RequestList
from meshift.schemas.errors import MoveDeclined, NotFound, Overloaded
from meshift.schemas.identity import Owner
from meshift.schemas.instances import DrainReply, DrainStatus, InstanceState
from meshift.schemas.moves import MoveMode, MoveOutcome, MoveRefusal, MovesReply
from meshift.services.cli import admin, drain, instances, move, moves, requests, restart_workers
from meshift.services.cli.errors import CommandError
from meshift.services.cli.main import main
from meshift.services.cli.tables import ViewSettings, amount, seconds, show
from meshift.services.frontend.http import make_access
from meshift.services.frontend.text.tokenizer import ChatTokenizer
from tests.support.reports import load_report
from tests.unit.frontend.fake_frontend import FakeOperators, move_report
from tests.unit.frontend.http.harness import Shell, make_shell
from tests.unit.frontend.http.test_admin import OPEN
from tests.unit.frontend.text.tiny_model import write_tiny_model

ADMIN = "sk-admin"
ACCESS: dict[str, Any] = {"url": "http://mesh", "admin_key": ADMIN}
DRAIN = DrainStatus(left=3, moving=2, moved=4, deadline_s=12.4, blocked="1 of 3 requests: no_room: full")


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    folder = write_tiny_model(tmp_path / "tiny")
    access = make_access(["sk-client"], [ADMIN], insecure_no_keys=False)
    return make_shell(folder, ChatTokenizer.load(folder), access=access)


@pytest.fixture
def operators(shell: Shell) -> FakeOperators:
    return shell.frontend.operators


@pytest.fixture
def transport(shell: Shell) -> httpx.ASGITransport:
    return httpx.ASGITransport(app=shell.app)


def status(name: str, incarnation: int = 1, state: InstanceState = InstanceState.READY, **more: Any) -> InstanceStatus:
    values: dict[str, Any] = {"answers": True, "engine": "sim"} | more
    return InstanceStatus(load=load_report(name, incarnation, state=state), **values)


# ---- views


def test_the_table_of_instances() -> None:
    listed = InstanceList(
        data=(
            status("a", moves_out=1, state=InstanceState.DRAINING, drain=DRAIN),
            status("b", moves_in=1, drain=DRAIN.model_copy(update={"deadline_s": 3e7, "blocked": ""})),
            status("c", answers=False, engine=""),
        )
    )
    assert instances.render(listed).splitlines() == [
        "INSTANCE  STATE     MODEL  ENGINE  RUN  WAIT  USED/CAPACITY  RESERVED  OUT  IN  DRAIN",
        "a         draining  m      sim       0     0         0/1000         0    1   0  "
        "3 here, 2 moving, 4 moved, 12 s left; blocked: 1 of 3 requests: no_room: full",
        "b         ready     m      sim       0     0         0/1000         0    0   1  3 here, 2 moving, 4 moved",
        "c         ready     m      ?         0     0         0/1000         0    ?   ?  doesn't answer",
    ]
    assert instances.render(InstanceList(data=())) == "no instance is live"


def test_the_table_of_requests() -> None:
    new = OPEN.model_copy(update={"request_id": "chatcmpl-2-1", "state": "submitting"})
    text = requests.render(RequestList(data=(OPEN, new), total=5, unanswered=("frontend-9",)))
    assert text.splitlines() == [
        "REQUEST       MODEL  STATE       INSTANCE  ATTEMPT  MOVES  PROMPT  OUTPUT  FRONTEND",
        "chatcmpl-1    tiny   running     worker-1        2      1       7       5  frontend-2",
        "chatcmpl-2-1  tiny   submitting  -               2      1       7       5  frontend-2",
        "... and 3 more",
        "without those of frontend-9: no answer",
    ]
    assert requests.render(RequestList(data=(), total=0)) == "no request is open"


def test_the_table_of_moves() -> None:
    stayed = move_report(
        outcome=MoveOutcome.STAYED, destination=None, refusal=MoveRefusal.NO_ROOM, reason="full", figures={}
    )
    under_way = move_report(outcome=None, phase="copying")
    told = MovesReply(owner=Owner("worker-1", 1), running=(under_way,), ended=(move_report(), stayed))
    head, *rows, last = moves.render(MoveList(data=(told,), unanswered=("worker-9",))).splitlines()
    assert head.split() == list(moves.COLUMNS)
    assert [row.split() for row in rows] == [
        ["chatcmpl-1", "worker-1", "worker-2", "live", "moved", "2", "70", "6.7", "MiB", "12.0", "ms", "50.0", "ms"],
        ["chatcmpl-1", "worker-1", "-", "live", "stayed", "0", "0", "-", "-", "-", "no_room:", "full"],
        ["chatcmpl-1", "worker-1", "worker-2", "live", "copying", "2", "70", "6.7", "MiB", "12.0", "ms", "50.0", "ms"],
    ]
    assert last == "without those of worker-9: no answer"
    assert moves.render(MoveList(data=())) == "nothing has moved"


def test_units() -> None:
    assert [seconds(value) for value in (0, 1_500_000, 2_345_000_000)] == ["-", "1.5 ms", "2.35 s"]
    assert [amount(value) for value in (0, 12, 2048, 3 << 30, 5 << 50)] == [
        "-",
        "12 B",
        "2.0 KiB",
        "3.0 GiB",
        "5120.0 TiB",
    ]


@pytest.mark.parametrize(
    ("ask", "render"),
    [(instances._ask, instances.render), (requests._ask, requests.render), (moves._ask, moves.render)],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_views_ask_the_mesh(
    ask: Any, render: Any, as_json: bool, transport: httpx.ASGITransport, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = admin.AdminViewSettings.model_validate({**ACCESS, "json": as_json})
    assert admin.view(settings, ask, render, transport) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("{") is as_json
    with pytest.raises(CommandError, match="admin key"):
        admin.view(admin.AdminViewSettings(url="http://mesh"), ask, render, transport)


async def test_watching() -> None:
    looks: list[int] = []

    async def look() -> str:
        looks.append(1)
        if len(looks) == 3:
            raise KeyboardInterrupt
        return "x"

    with pytest.raises(KeyboardInterrupt):
        await show(look, ViewSettings(watch=True, interval_s=1e-6))
    await show(look, ViewSettings())
    assert len(looks) == 4


@pytest.mark.parametrize("command", ["instances", "requests", "moves"])
def test_nobody_is_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--url", "http://127.0.0.1:1"]) == 1
    said = f"meshift {command}: no mesh answers at http://127.0.0.1:1; `meshift up` starts one\n"
    assert capsys.readouterr().err == said


# ---- move


def ordered(**values: Any) -> move.MoveSettings:
    return move.MoveSettings.model_validate({**ACCESS, "request": "chatcmpl-1", **values})


async def test_a_move_is_ordered(operators: FakeOperators, transport: httpx.ASGITransport) -> None:
    settings = ordered(to="worker-2", mode="blocking", deadline_s=3.0, wait=False)
    assert await move.order(settings, transport) == operators.report
    body = MoveBody(destination="worker-2", mode=MoveMode.BLOCKING, deadline_s=3.0)
    assert operators.moved == [("chatcmpl-1", body)]


async def test_the_beginning_of_an_id_will_do(operators: FakeOperators, transport: httpx.ASGITransport) -> None:
    names = ("chatcmpl-1", "chatcmpl-1-0", "chatcmpl-25")
    operators.open = [OPEN.model_copy(update={"request_id": name}) for name in names]
    for text, meant in (("chatcmpl-2", "chatcmpl-25"), ("chatcmpl-1", "chatcmpl-1"), ("x", "x")):
        await move.order(ordered(request=text), transport)
        assert operators.moved[-1][0] == meant
    with pytest.raises(CommandError, match="may be any of 3 requests"):
        await move.order(ordered(request="chat"), transport)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NotFound("there is no open request 'r'", param="request_id"), "see `meshift requests`"),
        (NotFound("there is no instance 'w'", param="destination"), "'w'; see `meshift instances`"),
        (MoveDeclined("r stays where it is: it moves already", refusal="busy"), "it moves already"),
    ],
)
async def test_moves_that_are_refused(
    error: Exception, said: str, operators: FakeOperators, transport: httpx.ASGITransport
) -> None:
    operators.error = error  # type: ignore[assignment]
    with pytest.raises(CommandError, match=said):
        await move.order(ordered(), transport)


def test_what_became_of_a_move() -> None:
    way = "chatcmpl-1: worker-1 -> worker-2"
    assert move.describe(move_report()) == (
        f"{way}: moved in 50.0 ms, frozen for 12.0 ms; 70 tokens, 6.7 MiB in 2 rounds"
    )
    assert "computed anew" in move.describe(move_report(mode=MoveMode.RECOMPUTE))
    assert move.describe(move_report(outcome=None, phase="copying")).startswith(f"{way}: copying; ")
    stayed = move_report(outcome=MoveOutcome.STAYED, refusal=MoveRefusal.NO_ROOM, reason="full", destination=None)
    assert move.describe(stayed) == "chatcmpl-1: worker-1 -> another instance: stayed, no_room: full"


@pytest.mark.parametrize(
    ("outcome", "exit_status"), [(MoveOutcome.MOVED, 0), (None, 0), (MoveOutcome.STAYED, 1), (MoveOutcome.ENDED, 1)]
)
def test_the_exit_status_says_whether_it_moved(
    outcome: MoveOutcome | None, exit_status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def order(_settings: move.MoveSettings) -> Any:
        return move_report(outcome=outcome)

    monkeypatch.setattr(move, "order", order)
    assert main(["move", "chatcmpl-1", "--json"]) == exit_status
    assert '"byte_count": 7000000' in capsys.readouterr().out


# ---- drains


class Told(list[str]):
    """What a command said."""

    def has(self, *parts: str) -> None:
        assert len(self) == len(parts), self
        for line, part in zip(self, parts, strict=True):
            assert part in line


async def test_drain_command(operators: FakeOperators, transport: httpx.ASGITransport) -> None:
    told = Told()
    settings = drain.DrainSettings.model_validate({"instance": "a", "deadline_s": 4.0, "url": "http://mesh"})
    with pytest.raises(CommandError, match="admin key"):
        await drain.run(settings, transport, told.append)
    settings = drain.DrainSettings.model_validate({**settings.model_dump(), "admin_key": ADMIN})
    await drain.run(settings, transport, told.append)
    forced = settings.model_copy(update={"force": True})
    await drain.run(forced, transport, told.append)
    patient = settings.model_copy(update={"deadline_s": None, "restart": True})
    await drain.run(patient, transport, told.append)
    told.has("a#1 drains: 3 requests left, 4 s for them", "no time for them", "no deadline")
    assert operators.drained == [
        ("a", DrainBody(deadline_s=4.0)),
        ("a", DrainBody(deadline_s=4.0, force=True)),
        ("a", DrainBody(deadline_s=None, restart=True)),
    ]
    for error, said in (
        (NotFound("no"), "there is no instance 'a'"),
        (Overloaded("it drains already"), "it drains already"),
    ):
        operators.error = error
        with pytest.raises(CommandError, match=said):
            await drain.run(settings, transport, told.append)


class Scripted(FakeOperators):
    """Each look at the instances shows the next thing; the last one stays."""

    looks: list[list[InstanceStatus]]

    async def instances(self) -> InstanceList:
        seen = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        return InstanceList(data=tuple(seen))

    async def drain(self, instance_id: str, body: DrainBody) -> DrainReply:
        self.drained.append((instance_id, body))
        return DrainReply(owner=Owner(instance_id, 1), requests_left=3)


@pytest.fixture
def scripted(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Scripted, httpx.ASGITransport]:
    for module in (drain, restart_workers):
        monkeypatch.setattr(module, "POLL_S", 1e-6)
    mesh = Scripted()
    shell.frontend.operators = mesh
    again = make_shell(tmp_path / "tiny", shell.tokenizer, frontend=shell.frontend)
    return mesh, httpx.ASGITransport(app=again.app)


async def test_waiting_for_a_drain(scripted: tuple[Scripted, httpx.ASGITransport]) -> None:
    mesh, transport = scripted
    going = [
        status("a", state=InstanceState.DRAINING, drain=DRAIN.model_copy(update={"left": left})) for left in (3, 3, 1)
    ]
    mesh.looks = [*([item] for item in going), [status("a", 2)]]
    told = Told()
    settings = drain.DrainSettings.model_validate({**ACCESS, "instance": "a", "wait": True})
    await drain.run(settings, transport, told.append)
    told.has("a#1 drains: 3", "a#1: 3 here, 2 moving, 4 moved", "a#1: 1 here", "a#1 has left")


def restarting(**values: Any) -> restart_workers.RestartSettings:
    return restart_workers.RestartSettings.model_validate({**ACCESS, **values})


async def test_a_rolling_restart(scripted: tuple[Scripted, httpx.ASGITransport]) -> None:
    mesh, transport = scripted
    a, b, again_a, again_b = status("a"), status("b"), status("a", 2), status("b", 2)
    starting = status("a", 2, InstanceState.STARTING)
    mesh.looks = [[a, b], [a, b], [b], [starting, b], [again_a, b], [again_a, b], [again_a], [again_a, again_b]]
    told = Told()
    await restart_workers.run(restarting(), transport, told.append)
    assert mesh.drained == [(name, DrainBody(deadline_s=300.0, restart=True)) for name in "ab"]
    assert [line for line in told if "leaving" not in line] == [
        "[1/2] a", "a#1 has left", "a#2 is ready", "[2/2] b", "b#1 has left", "b#2 is ready",
    ]  # fmt: skip


async def test_a_worker_that_does_not_come_back_stops_it(scripted: tuple[Scripted, httpx.ASGITransport]) -> None:
    mesh, transport = scripted
    a, b = status("a"), status("b")
    mesh.looks = [[a, b], [b]]
    with pytest.raises(CommandError, match=r"a doesn't serve again after 0\.05 s"):
        await restart_workers.run(restarting(start_deadline_s=0.05), transport, Told().append)
    assert [name for name, _ in mesh.drained] == ["a"]


async def test_whom_to_restart(scripted: tuple[Scripted, httpx.ASGITransport]) -> None:
    mesh, transport = scripted
    mesh.looks = [[status("a")]]
    with pytest.raises(CommandError, match="there is no instance c; see"):
        await restart_workers.run(restarting(instances=["a", "c"]), transport, Told().append)
    mesh.looks = [[status("a")], [], [status("a", 2)]]
    told = Told()
    await restart_workers.run(restarting(instances=["a"]), transport, told.append)
    told.has("the only instance", "[1/1] a", "a#1 has left", "a#2 is ready")
    mesh.looks = [[]]
    with pytest.raises(CommandError, match="no instance at all"):
        await restart_workers.run(restarting(), transport, Told().append)


@pytest.mark.parametrize("command", [["drain"], ["move", "r", "--to"], ["restart-workers"]])
def test_names_that_can_not_be(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "no.such*name"]) == 2
    assert "must be 1 to 64 letters" in capsys.readouterr().err
