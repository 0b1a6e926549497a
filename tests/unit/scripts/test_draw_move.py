"""The picture of a move, from spans as the trace file has them."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from scripts.draw_move import DrawingError, choose_move, draw, main, read_spans, rows_of

REQUEST, MOVE = "0xaa", "0xbb"


def line(name: str, trace: str, span: str, parent: str | None, begin_ms: int, end_ms: int, **more: Any) -> str:
    def time(at_ms: int) -> str:
        return f"2026-01-02T03:04:05.{at_ms:03d}000Z"

    return json.dumps(
        {
            "name": name,
            "context": {"trace_id": trace, "span_id": span},
            "parent_id": parent,
            "start_time": time(begin_ms),
            "end_time": time(end_ms),
            "attributes": more.get("attributes", {}),
            "links": [{"context": {"trace_id": trace}} for trace in more.get("links", ())],
            "resource": {"attributes": {"service.instance.id": more.get("instance", "worker-1")}},
        }
    )


SENT = {"meshift.transfer.tokens": 70, "meshift.transfer.bytes": 1_500_000}
LINES = [
    line("meshift.generate", REQUEST, "1", "0", 0, 150),
    line("meshift.generate", REQUEST, "2", "1", 148, 400, instance="worker-2"),
    line("meshift.generate", REQUEST, "3", "0", 500, 600, instance="worker-3"),
    line("meshift.move.commit", MOVE, "13", "10", 140, 149),
    line("meshift.move.round", MOVE, "11", "10", 105, 130, attributes=SENT),
    line("meshift.move.transfer", MOVE, "12", "11", 110, 130, attributes=SENT),
    line(
        "meshift.move", MOVE, "10", None, 100, 150, links=[REQUEST],
        attributes={
            "meshift.move.outcome": "moved", "meshift.move.mode": "live", "meshift.move.rounds": 2,
            "meshift.move.frozen": 0.012, "meshift.source": "worker-1#5", "meshift.destination": "worker-2#6",
            "meshift.request.id": "r<1>", "meshift.request.hop": 1,
        },
    ),
    line("meshift.move", "0xcc", "20", None, 300, 310, attributes={"meshift.move.outcome": "stayed"}),
]  # fmt: skip


def test_rows_are_the_request_and_the_move_in_order() -> None:
    spans = read_spans(LINES)
    rows = rows_of(spans, choose_move(spans, None))
    assert [row.label.replace("\u00a0", " ") for row in rows] == [
        "request runs at worker-1",
        "request runs at worker-2",
        "meshift.move",
        "  round",
        "    transfer",
        "  commit",
    ]
    assert rows[2].note == "50.0 ms; live, 2 rounds; stopped for 12.0 ms"
    assert rows[3].note == "25.0 ms; 70 tokens, 1.50 MB"


def test_the_picture_can_be_read() -> None:
    spans = read_spans(LINES)
    root = ElementTree.fromstring(draw(spans, choose_move(spans, "bb")))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "A running request moves from worker-1#5 to worker-2#6" in texts
    assert "request r<1>, hop 1" in texts
    assert [text for text in texts if text and text.endswith(" ms")][:2] == ["0 ms", "10 ms"]


@pytest.mark.parametrize(("chosen", "said"), [("0xdd", "no such move"), (None, "no move that came about")])
def test_nothing_to_draw(chosen: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DrawingError, match=said):
        choose_move(read_spans(LINES[-1:]), chosen)
    traces = tmp_path / "traces.jsonl"
    traces.write_text("\n".join(LINES[-1:]))
    assert main([str(traces), str(tmp_path / "x.svg"), *(["--move", chosen] if chosen else [])]) == 1
    assert said in capsys.readouterr().err
    traces.write_text("\n".join(LINES))
    assert main([str(traces), str(tmp_path / "x.svg")]) == 0
    assert (tmp_path / "x.svg").read_text().startswith("<svg")
