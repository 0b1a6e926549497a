"""Traces from files, on small ones in each format."""

import gzip
import json
from pathlib import Path

import pytest

from meshift.services.simulation.traces import TraceError, TraceRow, load_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:49.0000000,10,0
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,230,1317,Conversation log
47,ChatGPT,9,0,9,API log
"""
PLAIN = "arrival_s,input_tokens,output_tokens\n1.5,10,20\n1.0,30,40\n"
MOONCAKE = [
    {"timestamp": 3000, "input_length": 7, "output_length": 8, "hash_ids": []},
    {"timestamp": 0, "input_length": 1, "output_length": 2, "hash_ids": [0, 1]},
    {"timestamp": 0, "input_length": 3, "output_length": 4, "hash_ids": [0]},
    {"timestamp": 0, "input_length": 5, "output_length": 6, "hash_ids": [0]},
]
SHARE = [
    {"id": "a", "conversations": [
        {"from": "human", "value": "x" * 40}, {"from": "gpt", "value": "y" * 9},
        {"from": "human", "value": "z" * 4}, {"from": "gpt", "value": "w" * 8},
    ]},
    {"id": "b", "conversations": [{"from": "gpt", "value": "starts by itself"}]},
]  # fmt: skip


def load(path: Path, text: str, name: str = "trace.csv") -> list[TraceRow]:
    file = path / name
    file.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return load_trace(file)


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_azure(tmp_path: Path, name: str) -> None:
    first, second = load(tmp_path, AZURE, name)
    assert (first.arrival_s, first.input_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.arrival_s == pytest.approx(4.314579, abs=1e-6)


def test_burst_gpt_without_its_failures(tmp_path: Path) -> None:
    assert load(tmp_path, BURST) == [TraceRow(0.0, 472, 18), TraceRow(40.0, 1087, 230)]


def test_plain_is_sorted_and_begins_at_zero(tmp_path: Path) -> None:
    assert load(tmp_path, PLAIN) == [TraceRow(0.0, 30, 40), TraceRow(0.5, 10, 20)]


def test_mooncake_steps_are_spread(tmp_path: Path) -> None:
    rows = load(tmp_path, "\n".join(map(json.dumps, MOONCAKE)) + "\n", "trace.jsonl")
    assert rows == [TraceRow(0.0, 1, 2), TraceRow(1.0, 3, 4), TraceRow(2.0, 5, 6), TraceRow(3.0, 7, 8)]


def test_share_gpt_is_a_request_a_turn(tmp_path: Path) -> None:
    rows = load(tmp_path, json.dumps(SHARE), "trace.json")
    assert rows == [TraceRow(None, 10, 3), TraceRow(None, 14, 2)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,b\n1,2\n", "no format that is known"),
        ("", "no format that is known"),
        ("arrival_s,input_tokens,output_tokens\n", "no requests"),
        ("arrival_s,input_tokens,output_tokens\n0,one,2\n", "invalid literal"),
        ('{"timestamp": 1}\n', "input_length"),
        ("[1, 2]", "subscriptable"),
        ("[{]", "Expecting"),
    ],
)
def test_what_is_no_trace_says_why(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(TraceError, match=says) as refused:
        load(tmp_path, text)
    assert "trace.csv" in str(refused.value)


def test_a_broken_archive_is_no_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv.gz"
    file.write_bytes(gzip.compress(PLAIN.encode())[:-9])
    with pytest.raises(TraceError):
        load_trace(file)
