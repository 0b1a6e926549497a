"""What samples of layer moves come to."""

from typing import Any

from meshift.benchmarks.reconfigure_figures import aims, chart, result_of, table


def stream(run: int, kind: str, gaps: list[float], *, identical: bool = True, start: float = 0.0) -> dict[str, Any]:
    times = [start]
    for gap in [1.0, 1.0, 1.0, 1.0, *gaps]:
        times.append(times[-1] + gap)
    return {"measure": "stream", "run": run, "kind": kind, "stream": 0, "identical": identical, "times_ms": times}


def change(run: int, mode: str, commit: str, layers: int, stops_ms: list[float], **fields: Any) -> dict[str, Any]:
    times = {"began_ms": 100.0, "commit_ms": 200.0, "ended_ms": 210.0, **fields}
    return {
        "measure": "change", "run": run, "mode": mode, "commit": commit, "layers_moved": layers,
        "stop_ns": [int(stop * 1e6) for stop in stops_ms], "last_patch_tokens": 3, "last_patch_bytes": 9, **times,
    }  # fmt: skip


SAMPLES = [
    {"measure": "circumstances", "live_kv_bytes": 120e6, "link_gbps": 2.0, "cores": 2, "others_cores": 0.1},
    stream(0, "undisturbed", [40.0] * 98 + [70.0, 40.0]),
    stream(1, "full", [40.0, 40.0, 90.0, 40.0] + [40.0] * 30 + [500.0]),
    stream(2, "restart", [40.0, 9000.0], identical=False),
    change(1, "full", "lag", 14, [0.4, 1.2]),
    change(1, "full", "lag", 14, [0.8, 0.2]),
    change(1, "full", "lag", 1, [0.3, 0.9]),
    change(1, "full", "drain", 14, [30.0, 50.0]),
    change(1, "no-patch", "drain", 14, [800.0, 700.0]),
    change(2, "restart", "drain", 14, [9000.0], ended_ms=9100.0),
]


def test_rows() -> None:
    result = result_of(SAMPLES)
    assert (result["decode_step_ms_p50"], result["live_kv_mb"]) == (40.0, 120.0)
    rows = {(row["mode"], row["commit"], row["layers_moved"]): row for row in result["rows"]}
    assert list(rows) == [
        ("full", "drain", 14), ("full", "lag", 1), ("full", "lag", 14), ("no-patch", "drain", 14),
        ("restart", "drain", 14),
    ]  # fmt: skip
    lag = rows["full", "lag", 14]
    assert (lag["stop_ms_p50"], lag["stop_ms_max"], lag["repeats"], lag["identical"]) == (1.0, 1.2, 2, True)
    # The gap long after the change isn't its.
    assert (lag["gap_ms_max"], lag["normal_gap_ms_p99"], lag["total_s"]) == (90.0, 70.0, 0.11)
    restart = rows["restart", "drain", 14]
    assert (restart["gap_ms_max"], restart["identical"], restart["total_s"]) == (9000.0, False, 9.0)


def test_aims_and_pictures() -> None:
    result = result_of(SAMPLES)
    said = aims(result)
    assert [line.split()[0] for line in said] == ["met", "met", "met"]
    assert "800" in said[2]
    assert "ALTERED" in table(result)[-1]
    assert "full, lag" in chart(result)
