"""Layers' KV from one rank's memory to another's, over a real data plane on loopback, while somebody writes."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from meshift.backends.sglang.plugin.data_plane import DataPlane
from meshift.backends.sglang.plugin.layers import copying
from meshift.backends.sglang.plugin.layers.copying import LayerCopy, PairCopy
from meshift.backends.sglang.plugin.layers.receiving import LayerReceiver, wait_until_applied
from meshift.backends.sglang.plugin.layers.rows import LayerRows
from meshift.backends.sglang.wire_layers import LayerPair
from meshift.kv_memory.dirty_map import DirtyMap

SLOTS, LAYERS, HEADS, DIM = 300, 3, 2, 16
PAIR = LayerPair(transfer_id="layers/c1/0/0-1", source=0, destination=1, start=4, end=4 + LAYERS)
DEADLINE_S = 20.0
SEED = 5


def new_rows() -> tuple[list[tuple[torch.Tensor, torch.Tensor]], LayerRows]:
    buffers = [(torch.zeros(SLOTS, HEADS, DIM), torch.zeros(SLOTS, HEADS, DIM)) for _ in range(LAYERS)]
    return buffers, LayerRows(buffers)


@dataclass
class Ends:
    """Both ends of one pair, and the writer at its source."""

    data: list[DataPlane]
    source: list[tuple[torch.Tensor, torch.Tensor]]
    sink: list[tuple[torch.Tensor, torch.Tensor]]
    receiver: LayerReceiver
    arrived: threading.Condition
    rows: LayerRows
    dirty: DirtyMap = field(default_factory=lambda: DirtyMap(SLOTS))
    scheduled: int = 1

    def write(self, slots: Any) -> None:
        """A step: new values in these slots, then marks, then the count."""
        index = torch.as_tensor(slots, dtype=torch.int64)
        for key, value in self.source:
            key[index] = torch.randn(len(index), HEADS, DIM)
            value[index] = torch.randn(len(index), HEADS, DIM)
        self.dirty.mark(index.numpy())
        self.scheduled += len(index)

    def copy(self, live: Any, bytes_per_s: float | None = None) -> LayerCopy:
        address = self.data[1].open_transfer(PAIR.transfer_id, self.receiver.apply)
        pair = PairCopy(PAIR, address, self.rows, self.dirty, np.asarray(live, np.int64))
        return LayerCopy([pair], self.data[0], (0, HEADS), lambda: self.scheduled, bytes_per_s)

    def arrives(self, watermark: int) -> bool:
        return wait_until_applied([self.receiver], watermark, self.arrived, DEADLINE_S)

    def equal(self, slots: Any) -> bool:
        index = torch.as_tensor(slots, dtype=torch.int64)
        pairs = zip(self.source, self.sink, strict=True)
        return all(torch.equal(a[index], b[index]) for mine, its in pairs for a, b in zip(mine, its, strict=True))


@pytest.fixture
def ends() -> Iterator[Ends]:
    torch.manual_seed(SEED)
    data = [DataPlane(rank, "127.0.0.1", lambda: pytest.fail("nothing is reported")) for rank in range(2)]
    for one in data:
        one.start()
    source, rows = new_rows()
    sink, sink_rows = new_rows()
    arrived = threading.Condition()
    yield Ends(data, source, sink, LayerReceiver(PAIR, sink_rows, arrived), arrived, rows)
    assert all(one.close() for one in data)


def eventually(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def end(copy: LayerCopy) -> None:
    copy.stop()
    copy.join()


def test_rows_there_and_back() -> None:
    buffers, rows = new_rows()
    for key, value in buffers:
        key.normal_()
        value.normal_()
    others, other_rows = new_rows()
    slots = np.array([250, 3, 77], np.int64)
    payload = memoryview(bytearray(3 * rows.slot_bytes))
    rows.gather(slots, payload)
    assert other_rows.scatter(bytes(payload)).tolist() == [250, 3, 77]
    for mine, its in zip(buffers, others, strict=True):
        for one, other in zip(mine, its, strict=True):
            assert torch.equal(one[slots], other[slots])
            assert float(other.abs().sum()) == pytest.approx(float(one[slots].abs().sum()))
    with pytest.raises(ValueError, match="whole slots"):
        other_rows.scatter(bytes(payload)[:-1])
    assert other_rows.scatter(b"").tolist() == []


def test_all_live_slots_then_what_is_written(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "PIECE_BYTES_MAX", 10 * ends.rows.slot_bytes)
    live = range(16, 120)
    ends.write(live)
    copy = ends.copy(live)
    copy.start()
    assert ends.arrives(ends.scheduled)
    assert ends.equal(live)
    assert ends.receiver.rounds == 1
    chance = random.Random(SEED)
    for _ in range(30):
        ends.write(sorted(chance.sample(range(16, SLOTS), 7)))
        copy.note()
    copy.finish()
    assert ends.arrives(ends.scheduled)
    eventually(lambda: copy.is_finished)
    assert ends.equal(range(16, SLOTS))
    assert copy.problem == ""
    assert ends.dirty.readers == ()
    end(copy)


def test_what_is_written_after_the_end_is_not_sent(ends: Ends) -> None:
    ends.write(range(20, 30))
    copy = ends.copy(range(20, 30))
    copy.finish()
    final = ends.scheduled
    copy.start()
    assert ends.arrives(final)
    eventually(lambda: copy.is_finished)
    before = [(key.clone(), value.clone()) for key, value in ends.sink]
    ends.write(range(20, 40))
    copy.note()
    end(copy)
    assert ends.receiver.applied == final
    assert all(
        torch.equal(a, b) for old, new in zip(before, ends.sink, strict=True) for a, b in zip(old, new, strict=True)
    )


def test_no_live_slot_at_all(ends: Ends) -> None:
    copy = ends.copy([])
    copy.start()
    assert ends.arrives(ends.scheduled)
    assert (ends.receiver.rounds, ends.receiver.byte_count) == (1, 0)
    copy.finish()
    eventually(lambda: copy.is_finished)
    end(copy)


def test_a_broken_transfer_is_told_and_staging_comes_back(ends: Ends) -> None:
    copy = ends.copy(range(20, 200))
    ends.data[1].close_transfer(PAIR.transfer_id)
    copy.start()
    eventually(lambda: copy.problem != "")
    assert "layers 4-7" in copy.problem
    end(copy)
    eventually(lambda: ends.data[0].staging.used_bytes == 0)
    assert ends.dirty.readers == ()


def test_stopping_in_the_middle(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "PIECE_BYTES_MAX", ends.rows.slot_bytes)
    copy = ends.copy(range(16, SLOTS), bytes_per_s=ends.rows.slot_bytes * 50.0)
    copy.start()
    eventually(lambda: ends.receiver.byte_count > 0)
    end(copy)
    assert ends.receiver.applied == -1
    eventually(lambda: ends.data[0].staging.used_bytes == 0)


def test_the_rate_is_bounded(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "PIECE_BYTES_MAX", 4 * ends.rows.slot_bytes)
    copy = ends.copy(range(20, 60), bytes_per_s=ends.rows.slot_bytes * 200.0)
    began_s = time.monotonic()
    copy.start()
    assert ends.arrives(ends.scheduled)
    assert time.monotonic() - began_s > 0.15
    end(copy)


def test_a_foreign_patch_is_refused(ends: Ends) -> None:
    copy = ends.copy(range(20, 30))
    copy.start()
    assert ends.arrives(ends.scheduled)
    end(copy)
    from meshift.kv_memory.rectangle import Rectangle
    from meshift.kv_memory.transport.base import Patch

    with pytest.raises(ValueError, match="layers"):
        ends.receiver.apply(Patch(PAIR.transfer_id, 9, 9, Rectangle(3, 7, 0, 0, 0, HEADS), b"", 0))
    with pytest.raises(ValueError, match="round"):
        ends.receiver.apply(Patch(PAIR.transfer_id, 9, 0, Rectangle(4, 7, 0, 0, 0, HEADS), b"", 0))
