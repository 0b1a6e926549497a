"""Who waits, and who ends, when a batch's last request has no memory for its next token."""

from types import SimpleNamespace
from typing import Any

import pytest

from meshift.backends.sglang.plugin.preemption import spare_the_last

ROWS = 4


def request(name: str, holds_kv: bool = False, beam: Any = None) -> Any:
    return SimpleNamespace(name=name, to_finish="out of memory", kv=SimpleNamespace(holds_kv=holds_kv), beam_group=beam)


@pytest.mark.parametrize(
    ("rows_free", "ends"),
    [(ROWS, ["last"]), (ROWS - 1, [])],
    ids=["it is alone", "another one holds memory"],
)
def test_the_last_of_a_batch(rows_free: int, ends: list[str]) -> None:
    batch = SimpleNamespace(req_to_token_pool=SimpleNamespace(size=ROWS, free_slots=[0] * rows_free))
    other, last = request("other"), request("last")
    retracted, ratio, aborted = spare_the_last(lambda batch: ([other], 0.5, [last]), batch)
    assert ratio == 0.5
    assert [req.name for req in aborted] == ends
    assert [req.name for req in retracted] == (["other"] if ends else ["other", "last"])
    assert last.to_finish == ("out of memory" if ends else None)


@pytest.mark.parametrize("hopeless", [request("last", holds_kv=True), request("last", beam=object())])
def test_what_cannot_be_computed_again_ends(hopeless: Any) -> None:
    batch = SimpleNamespace(req_to_token_pool=SimpleNamespace(size=ROWS, free_slots=[]))
    assert spare_the_last(lambda batch: ([], 0.5, [hopeless]), batch) == ([], 0.5, [hopeless])
