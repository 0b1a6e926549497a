"""The arithmetic and the fairness of the overhead benchmark; the servers themselves are too slow for here."""

import asyncio
import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshift.backends.sglang.arguments import COMPUTE_NICENESS, server_arguments
from meshift.backends.sglang.plugin.activate import CPU_PLATFORM_VARIABLE, ENGINE_VARIABLE
from meshift.benchmarks.bare_sglang import (
    BareServer,
    BareServerError,
    be_nice,
    command_line,
    computing_processes,
    environment,
)
from meshift.benchmarks.bench_serving import Load, LoadError, Phase, check_result, follow
from meshift.benchmarks.cpu_parts import OTHER, PARTS, part_of, parts_s
from meshift.benchmarks.cpu_time import cpu_s, machine_cpu_s, tree
from meshift.benchmarks.mesh_process import UP
from meshift.benchmarks.overhead import (
    Samples,
    Used,
    alternating,
    cpu_ms_per_token,
    paired,
    quiet_or_not,
    short_chat,
    summary,
)
from meshift.services.launcher.base import LaunchSpec
from meshift.services.launcher.local import meshift_command
from meshift.services.worker.engines import EngineSettings, sglang_settings

LOAD = Load(Path("m"), requests=2, concurrency=1, input_tokens=4, output_tokens=8)


def throughput(pair: int, side: str, value: float) -> dict[str, Any]:
    return {"pair": pair, "side": side, "output_throughput": value}


def first_token(pair: int, side: str, value: float) -> dict[str, Any]:
    return {"pair": pair, "side": side, "ttft_ms": value}


def test_figures_are_medians_of_pairs() -> None:
    samples = Samples(
        throughput=[
            throughput(1, "mesh", 99.0),
            throughput(1, "bare", 100.0),
            throughput(0, "bare", 50.0),
            throughput(0, "mesh", 45.0),
            throughput(2, "bare", 10.0),
            throughput(2, "mesh", 11.0),
        ],
        first_token=[first_token(0, "bare", 100.0), first_token(0, "mesh", 104.0)],
    )
    assert summary(samples) == {
        "throughput_ratio": 0.99,
        "throughput_ratio_spread": [0.9, 1.1],
        "ttft_added_ms_p50": 4.0,
    }


def test_a_pair_without_its_other_half_is_refused() -> None:
    with pytest.raises(KeyError):
        paired([throughput(0, "bare", 1.0)], "output_throughput")


def test_the_order_alternates_also_before_the_first_pair() -> None:
    assert [alternating(pair)[0] for pair in range(-2, 3)] == ["bare", "mesh", "bare", "mesh", "bare"]


def test_chats_of_one_seed_are_equal_and_of_one_run_differ() -> None:
    chance = random.Random(0)
    chats = [short_chat("m", chance) for _ in range(20)]
    assert len({chat["messages"][0]["content"] for chat in chats}) == 20
    assert chats[0] == short_chat("m", random.Random(0))


def test_both_sides_get_the_same_server_arguments() -> None:
    settings = sglang_settings(EngineSettings(model=Path("folder")))
    words = command_line(server_arguments(settings))
    for name, value in server_arguments(settings).items():
        flag = f"--{name.replace('_', '-')}"
        if value is False:
            assert flag not in words
        else:
            position = words.index(flag)
            assert value is True or words[position + 1] == str(value)
    assert "--sleep-on-idle" in words


def test_what_has_no_flag_is_refused() -> None:
    with pytest.raises(ValueError, match="pairs"):
        command_line({"pairs": {"a": 1}})


def test_the_bare_server_is_stock() -> None:
    settings = sglang_settings(EngineSettings(model=Path("folder"))).model_copy(update={"device": "cpu"})
    bare = environment(settings, {"PATH": "p"})
    assert ENGINE_VARIABLE not in bare
    assert bare[CPU_PLATFORM_VARIABLE] == "1"
    assert bare["OMP_NUM_THREADS"]


async def test_the_bare_server_is_as_nice_as_a_rank_of_the_mesh() -> None:
    """A process by the name of SGLang's scheduler, below another one that is left alone."""
    sleep = "import sys; sys.stdin.read()"
    spawn = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleep!r}, 'sglang::scheduler'])"
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", spawn, stdin=asyncio.subprocess.PIPE)
    assert parent.stdin is not None
    server = BareServer("", parent, Path())
    try:
        async with asyncio.timeout(20):
            while not (computing := computing_processes(server)):
                await asyncio.sleep(0.01)
        be_nice(server, COMPUTE_NICENESS)
        assert [os.getpriority(os.PRIO_PROCESS, pid) for pid in computing] == [COMPUTE_NICENESS]
        assert os.getpriority(os.PRIO_PROCESS, parent.pid) == os.getpriority(os.PRIO_PROCESS, 0)
    finally:
        parent.stdin.close()
        await parent.wait()
    with pytest.raises(BareServerError):
        be_nice(server, COMPUTE_NICENESS)


def test_a_loaded_machine_is_named() -> None:
    quiet = {"cpu_s": {"others": 0.5}, "wall_s": 10.0}
    assert "trusted" not in quiet_or_not(Samples(throughput=[quiet]))
    assert "not to be trusted" in quiet_or_not(Samples(throughput=[quiet, {"cpu_s": {"others": 9.0}, "wall_s": 10.0}]))


def test_a_run_counts_only_when_it_is_whole() -> None:
    whole = {"completed": 2, "total_output_tokens": 16, "output_throughput": 1.5, "server_info": {"model": "m"}}
    assert check_result(whole, LOAD) == {"completed": 2, "total_output_tokens": 16, "output_throughput": 1.5}
    for change in ({"completed": 1}, {"total_output_tokens": 15}):
        with pytest.raises(LoadError):
            check_result(whole | change, LOAD)


async def said(words: list[str]) -> tuple[list[Phase], str]:
    """The phases that are noticed of a generator that says these words."""
    program = f"import sys\nfor word in {words!r}: print(word, flush=True)\nsys.exit(0)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    phases: list[Phase] = []
    text = await follow(process, phases.append)
    return phases, text


async def test_a_load_is_noticed_when_it_begins_and_when_it_ends() -> None:
    begins, ends = f"Warmed up. {Phase.BEGIN.value}...", f"==== {Phase.END.value} ===="
    assert await said(["loading", begins, "serving", ends, "bye"]) == (
        [Phase.BEGIN, Phase.END],
        "\n".join(["loading", begins, "serving", ends, "bye", ""]),
    )
    for silent in (["loading", ends], ["loading", begins]):
        with pytest.raises(LoadError, match="never said"):
            await said(silent)


def test_the_generator_says_these_words() -> None:
    package = importlib.util.find_spec("sglang")
    assert package is not None
    assert package.submodule_search_locations is not None
    source = (Path(package.submodule_search_locations[0]) / "benchmark" / "serving.py").read_text()
    assert all(phase.value in source for phase in Phase)


def test_time_is_told_by_parts() -> None:
    before = Used(10.0, {"bare": {"rank": 1.0}, "mesh": {"rank": 2.0}}, others=5.0)
    after = Used(14.0, {"bare": {"rank": 1.5}, "mesh": {"rank": 4.0, "worker": 1.0}}, others=6.0)
    used = after.since(before)
    assert used == {
        "wall_s": 4.0,
        "cpu_s": {"bare": 0.5, "mesh": 3.0, "others": 1.0},
        "parts_s": {"bare": {"rank": 0.5}, "mesh": {"rank": 2.0, "worker": 1.0}},
    }
    run = {"total_output_tokens": 100, **used}
    assert cpu_ms_per_token(Samples(throughput=[{**run, "side": side} for side in ("bare", "mesh")])) == {
        "bare": 5.0,
        "bare, rank": 5.0,
        "mesh": 30.0,
        "mesh, rank": 20.0,
        "mesh, worker": 10.0,
        "mesh, idle, per second": 750.0,
        "bare, idle, per second": 125.0,
    }


@pytest.mark.parametrize("service", ["worker", "frontend", "scheduler", "coordinator"])
def test_parts_are_told_by_their_command_lines(service: str) -> None:
    assert part_of(" ".join(meshift_command(LaunchSpec(service=service, settings={"scheduler_id": "s"})))) == service
    assert part_of(" ".join(UP)) == "up"
    assert part_of("python -P -m meshift.backends.sglang.rank spec") == "rank"
    assert part_of("sglang::scheduler_TP0") == part_of("sglang::scheduler") == "rank"
    assert part_of("bash") == OTHER


def test_parts_of_a_tree_add_up() -> None:
    name = next(iter(PARTS))
    burn = "import time\nwhile time.process_time() < 0.05: pass\nprint(flush=True)\ninput()"
    command = [sys.executable, "-c", burn, name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert set(parts_s(child.pid)) == {PARTS[name]}
        assert parts_s(child.pid)[PARTS[name]] == cpu_s(child.pid) >= 0.04
        child.communicate(b"\n")


def test_cpu_time_of_a_tree() -> None:
    burn = "import time\nwhile time.process_time() < 0.05: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        assert {os.getpid(), child.pid} <= set(tree(os.getpid()))
        assert 0.04 <= cpu_s(child.pid) < 5.0
        assert machine_cpu_s() > cpu_s(os.getpid()) >= cpu_s(child.pid)
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdin.close()
    assert cpu_s(child.pid) == 0.0
