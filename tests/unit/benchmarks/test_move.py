"""The move benchmark's arithmetic, from raw samples to figures; a real mesh is too slow for here."""

import json
import random
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from meshift.benchmarks import move
from meshift.benchmarks.cpu_time import thread_cpu_ns
from meshift.benchmarks.move_figures import (
    SamplesError,
    client_times_ns,
    decode_step_ms,
    move_figures,
    problems,
    rows,
)
from meshift.benchmarks.move_mesh import MeshStream, MoveBenchmarkError, TokenStep, TokenTap
from meshift.benchmarks.move_overhead import bootstrap, by_side, co_located, pairs_of
from meshift.benchmarks.move_tables import aims, chart, tables
from meshift.benchmarks.svg import decades
from meshift.schemas.base import pack_tokens
from meshift.schemas.identity import Owner
from meshift.schemas.requests import TokenBatch

TOKEN_BYTES = 100
PROMPT = 252
STEP_NS = 20_000_000
MS = 1_000_000
OUTPUT = list(range(1000, 1024))

CIRCUMSTANCES = {
    "measure": "circumstances", "settings": {"link_gbps": 1.0}, "token_bytes": TOKEN_BYTES, "threads": 1, "cores": 2,
    "others_cores": 0.5,
}  # fmt: skip


def stream(mode: str, gaps_ms: dict[int, int] | None = None, *, context: int = 256) -> dict[str, Any]:
    """A token every 20 ms; before those in `gaps_ms` the request changes its worker, and so long passes."""
    now_ns, instance = 0, 1
    steps: list[list[Any]] = []
    times_ns: list[int] = []
    for index in range(len(OUTPUT)):
        gap_ms = (gaps_ms or {}).get(index)
        instance = instance if gap_ms is None else 3 - instance
        now_ns += STEP_NS if gap_ms is None else gap_ms * MS
        steps.append([f"worker-{instance}", index, 1, now_ns])
        times_ns.append(now_ns)
    return {
        "measure": "stream", "name": f"{mode}-0-{context}", "mode": mode, "tokens": context, "prompt": str(context),
        "prompt_tokens": context - 4, "output": list(OUTPUT), "steps": steps, "text": "ab" * len(OUTPUT),
        # The client is 3 ms behind.
        "chunks": [[time_ns + 3 * MS, 2] for time_ns in times_ns],
        "token_chars": [2 * (index + 1) for index in range(len(OUTPUT))],
    }  # fmt: skip


def moved(
    mode: str, *, frozen_ms: float, tokens: int, computed: int = 0, back: bool = False, context: int = 256
) -> dict[str, Any]:
    ends = ("worker-2", "worker-1") if back else ("worker-1", "worker-2")
    figures = {"rounds": 3, "tokens": tokens, "byte_count": tokens * TOKEN_BYTES, "frozen_ns": round(frozen_ms * MS)}
    return {
        "measure": "move", "stream": f"{mode}-0-{context}", "mode": mode, "tokens": context, "source": ends[0],
        "destination": ends[1], "prefilled": computed,
        "report": {"outcome": "moved", "mode": mode, "reason": "", "figures": figures},
    }  # fmt: skip


def a_run(context: int = 256) -> list[dict[str, Any]]:
    """Two live moves, a blocking and a recomputing one; each frozen when the output has 6 (and 18) tokens."""
    short, long = context - 4 + 6 - 1, context - 4 + 18 - 1
    return [
        stream("undisturbed", context=context),
        moved("live", frozen_ms=8, tokens=short, context=context),
        moved("live", frozen_ms=10, tokens=long, back=True, context=context),
        stream("live", {6: 30, 18: 34}, context=context),
        moved("blocking", frozen_ms=400, tokens=short, context=context),
        stream("blocking", {6: 425}, context=context),
        moved("recompute", frozen_ms=7, tokens=0, computed=short + 1, context=context),
        stream("recompute", {6: 300}, context=context),
    ]


def beside(pairs: int = 4) -> list[dict[str, Any]]:
    """Steps of 20 ms with 10 ms of CPU; with a move under way 21 and 11 at the source, 20 and 10 at the destination.
    The source's have the mover in them. A slower step of the destination with the mover is among them."""
    samples: list[dict[str, Any]] = []
    now_ns = 0
    for pair in range(pairs):
        for kind, wall_ms in (("quiet", 20), ("move", 21)):
            begin_ns = now_ns
            for step in range(7):
                now_ns += wall_ms * MS
                cpu_ns = now_ns // 2 + (step * MS // 2 if kind == "move" else 0)
                samples.append(a_step("worker-1", now_ns, cpu_ns, ["a", "m"]))
            for step in range(7):
                at_ns = begin_ns + (step + 1) * 20 * MS
                samples.append(a_step("worker-2", at_ns, at_ns // 2, ["b"]))
            samples.append(a_step("worker-2", now_ns, now_ns, ["b", "m"]))
            ends = {"source": "worker-1", "destination": "worker-2", "begin_ns": begin_ns, "end_ns": now_ns}
            samples.append({"measure": "window", "pair": pair, "kind": kind, "mover": "m", **ends})
            now_ns += 100 * MS
    return samples


def a_step(instance: str, emitted_ns: int, cpu_ns: int, names: list[str]) -> dict[str, Any]:
    return {"measure": "step", "instance": instance, "emitted_ns": emitted_ns, "cpu_ns": cpu_ns, "names": names}


def test_rows_are_medians_of_moves() -> None:
    live, blocking, recompute = rows([CIRCUMSTANCES, *a_run()])
    assert live == {
        "mode": "live", "tokens": 256, "freeze_to_runnable_ms_p50": 9.0, "token_gap_ms_p50": 32.0, "rounds": 3,
        "bytes": (257 + 269) * TOKEN_BYTES // 2, "recomputed_tokens": 0, "identical": True, "repeats": 2,
    }  # fmt: skip
    assert (blocking["freeze_to_runnable_ms_p50"], blocking["token_gap_ms_p50"]) == (400.0, 425.0)
    assert recompute["recomputed_tokens"] == 258


def test_what_is_computed_anew_isnt_runnable_before_its_prefill_has_ended() -> None:
    recompute = rows([CIRCUMSTANCES, *a_run()])[2]
    assert recompute["freeze_to_runnable_ms_p50"] == 300.0, "not the 7 ms after which it was queued"


def test_gaps_are_compared_with_the_destinations_own_steps() -> None:
    run = a_run()
    for step in run[3]["steps"][7:]:
        step[3] += (step[1] - 6) * 5 * MS
    first, second = [figure for figure in move_figures(run) if figure.mode == "live"]
    assert (first.step_ms, first.gap_steps) == (25.0, 30 / 25)
    assert second.step_ms == 25.0
    assert decode_step_ms(run) == 20.0


def test_a_token_is_with_the_client_when_its_text_is() -> None:
    sample = stream("live")
    sample["token_chars"], sample["chunks"] = [1, 1, 3, 5], [[10, 1], [20, 4]]
    assert client_times_ns(sample) == [10, 10, 20, 20]
    sample["chunks"] = [[10, 1], [20, 3]]
    with pytest.raises(SamplesError, match="characters"):
        client_times_ns(sample)


def test_good_samples_have_no_problem() -> None:
    assert problems([CIRCUMSTANCES, *a_run()]) == []


def test_bytes_must_be_those_of_the_context() -> None:
    run = a_run()
    run[4]["report"]["figures"]["byte_count"] -= TOKEN_BYTES
    assert problems([CIRCUMSTANCES, *run]) == ["blocking of 257 tokens sent 25600 bytes, not 25700"]


def test_an_altered_output_is_a_problem_and_marks_its_row() -> None:
    run = a_run()
    run[5]["output"][-1] += 1
    assert problems([CIRCUMSTANCES, *run]) == ["blocking-0-256: not the undisturbed output"]
    assert [row["identical"] for row in rows(run)] == [True, False, True]


def test_an_altered_stream_marks_all_modes_that_it_was_moved_in() -> None:
    run = a_run()
    run[2]["mode"] = run[2]["report"]["mode"] = "recompute"
    run[3]["output"][-1] += 1
    assert [row["identical"] for row in rows(run)] == [False, True, False]


def test_modes_take_turns_and_recomputing_is_rarer() -> None:
    assert [mode.value[0] for mode in move.schedule(4)] == list("lbrlblblbr")


def test_an_altered_text_is_one_too() -> None:
    run = a_run()
    run[7]["text"] += "x"
    assert [row["identical"] for row in rows(run)] == [True, True, False]


def test_a_move_that_came_to_nothing_is_a_problem_and_no_figure() -> None:
    run = a_run()
    stayed = moved("live", frozen_ms=0, tokens=0)
    stayed["report"] = {**stayed["report"], "outcome": "stayed", "reason": "no room"}
    assert problems([CIRCUMSTANCES, *run, stayed]) == ["live-0-256: live came to stayed: no room"]
    assert rows([*run, stayed])[0]["repeats"] == 2


def test_a_move_that_nobody_ordered_is_refused() -> None:
    run = a_run()
    del run[2]
    with pytest.raises(SamplesError, match="1 moves, and 2 changes"):
        move_figures(run)


def test_a_move_in_another_mode_is_refused() -> None:
    run = a_run()
    run[4]["report"]["mode"] = "recompute"
    with pytest.raises(SamplesError, match="not the move that was ordered"):
        move_figures(run)


def test_a_run_without_its_undisturbed_one_is_refused() -> None:
    with pytest.raises(KeyError):
        rows(a_run()[1:])


def test_steps_are_compared_in_pairs_with_the_same_requests_in_them() -> None:
    pairs = pairs_of(beside())
    assert [pair.side for pair in pairs] == ["source", "destination"] * 4
    assert {round(pair.step_ratio, 4) for pair in pairs if pair.side == "source"} == {1.05}
    assert {pair.step_ratio for pair in pairs if pair.side == "destination"} == {1.0}
    assert {round(pair.cpu_ratio, 4) for pair in pairs if pair.side == "source"} == {1.1}
    medians = by_side(beside())
    assert [round(value, 4) for value in medians["source"]] == [1.05, 1.05, 1.1]


def test_co_located_is_the_median_of_pairs_within_its_interval() -> None:
    result = co_located(beside())
    assert result == {"steps_ratio_paired": 1.025, "ci95": [1.025, 1.025], "step_thread_cpu_ratio": 1.05}
    assert co_located(beside()) == result


def test_a_slow_step_is_in_the_mean() -> None:
    samples = beside()
    last = [step for step in samples if step["measure"] == "step" and step["instance"] == "worker-1"][13]
    last["emitted_ns"] += 60 * MS
    next(window for window in samples if window.get("kind") == "move")["end_ns"] += 60 * MS
    pair = pairs_of(samples)[0]
    assert (round(pair.step_ratio, 4), round(pair.mean_ratio, 4)) == (1.05, 1.55)


def test_windows_without_steps_give_no_figure() -> None:
    with pytest.raises(SamplesError, match="steps enough"):
        co_located([sample for sample in beside() if sample["measure"] == "window"])


def test_the_interval_has_the_true_median_mostly() -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    groups = [[chance.gauss(1.0, 0.1)] for _ in range(40)]
    low, high = bootstrap(groups, chance)
    assert 0.9 < low < high < 1.1, f"seed {seed}"
    assert bootstrap([[2.0], [2.0]], chance) == (2.0, 2.0)


def everything() -> list[dict[str, Any]]:
    return [CIRCUMSTANCES, *a_run(), *a_run(4096), *beside()]


def test_the_json_has_what_was_asked_for_and_no_more() -> None:
    result = move.result_of(everything())
    assert list(result) == ["decode_step_ms_p50", "link_gbps", "rows", "co_located"]
    assert [(row["tokens"], row["mode"]) for row in result["rows"]] == [
        (tokens, mode) for tokens in (256, 4096) for mode in ("live", "blocking", "recompute")
    ]
    assert set(result["co_located"]) == {"steps_ratio_paired", "ci95", "step_thread_cpu_ratio"}


def test_aims_are_judged_one_by_one() -> None:
    samples = everything()
    result = move.result_of(samples)
    judged = aims(result, move_figures(samples))
    assert [line.split()[0] for line in judged] == ["met"] * 6 + ["met", "MISSED"]
    result["rows"][3]["freeze_to_runnable_ms_p50"] = 31.0
    assert [line.split()[0] for line in aims(result, move_figures(samples))][:5] == [
        "MISSED", "MISSED", "met", "met", "MISSED",
    ]  # fmt: skip


def test_figures_are_computed_again_from_the_raw_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "move.json"
    assert move.report(path, everything()) == 0
    first = path.read_text()
    again = tmp_path / "again.json"
    raw = str(tmp_path / "move.json.raw.jsonl")
    assert move.main(["--from-raw", raw, "--json", str(again)]) == 0
    assert json.loads(again.read_text()) == json.loads(first)
    assert "are not to be trusted" in capsys.readouterr().out


def test_wrong_moves_fail_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    samples = everything()
    samples[4]["output"][0] = 0
    assert move.report(None, samples) == 1
    assert "ALTERED" in capsys.readouterr().out


def test_the_plot_is_a_picture_of_all_modes() -> None:
    picture = chart(move.result_of(everything()))
    root = ElementTree.fromstring(picture)
    lines = root.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2 * 3
    assert all(len(line.get("points", "").split()) == 2 for line in lines)
    assert "4096" in tables(move.result_of(everything()), everything())
    assert decades([5.0, 300.0]) == (0, 3)
    assert decades([10.0]) == (1, 2)
    assert decades([]) == (0, 1)


# ---- what is heard of a mesh


def batch(request_id: str, start: int, tokens: list[int], instance: str = "worker-1") -> TokenBatch:
    return TokenBatch(
        owner=Owner(instance, 1), emitted_ns=start, request_ids=("other", request_id), attempts=(1, 1), hops=(0, 0),
        starts=(0, start), counts=(1, len(tokens)), tokens=pack_tokens([7, *tokens]),
    )  # fmt: skip


async def test_the_tap_follows_a_stream_by_its_name() -> None:
    tap, watched = TokenTap(), MeshStream("live-0-256", [1])
    tap.watch(watched)
    tap.on_batch(batch("live-0-256-abc", 0, [10]))
    tap.on_batch(batch("live-0-256-abc", 0, [10]))
    tap.on_batch(batch("live-0-256-abc", 1, [], "worker-2"))
    tap.on_batch(batch("live-0-256-abc", 1, [11], "worker-2"))
    await tap.until(lambda: len(watched.output) == 2, "two tokens")
    assert (watched.output, watched.request_id, watched.instance) == ([10, 11], "live-0-256-abc", "worker-2")
    assert watched.steps == [TokenStep("worker-1", 0, 1, 0), TokenStep("worker-2", 1, 1, 1)]


async def test_a_gap_ends_the_measurement() -> None:
    tap, watched = TokenTap(), MeshStream("a", [1])
    tap.watch(watched)
    tap.on_batch(batch("a-0", 1, [10]))
    with pytest.raises(MoveBenchmarkError, match="tokens 0 to 1"):
        await tap.until(lambda: False, "anything")


def test_a_threads_cpu_time_by_the_schedulers_count_or_in_ticks(tmp_path: Path) -> None:
    task = tmp_path / "7" / "task" / "7"
    task.mkdir(parents=True)
    (task / "stat").write_text("7 (a (b) c) S " + " ".join(["0"] * 10 + ["3", "4"] + ["9"] * 30))
    ticks_ns = 10_000_000
    assert thread_cpu_ns(7, proc=tmp_path) == 7 * ticks_ns
    (task / "schedstat").write_text("123 4 5\n")
    assert thread_cpu_ns(7, proc=tmp_path) == 123
    with pytest.raises(OSError, match="8"):
        thread_cpu_ns(8, proc=tmp_path)
