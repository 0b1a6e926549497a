"""KV memory in torch tensors passes the transfer suite, for the types of elements that engines use."""

from collections.abc import Sequence

import pytest

torch = pytest.importorskip("torch")

from meshift.kv_memory.rectangle import Rectangle  # noqa: E402
from meshift.kv_memory.torch_rows import TorchRows, TorchRowsSink, TorchRowsSource  # noqa: E402
from tests.contract.kv_transfer_suite import KvRequest, KvTransferSuite  # noqa: E402

HEAD_DIM = 8


class WrittenRequest(TorchRowsSource, TorchRowsSink):
    """Source and sink in one, with an engine's writes."""

    def __init__(self, rows: TorchRows, slots: Sequence[int]) -> None:
        super().__init__(rows, slots)

    def write(self, start: int, payload: bytes) -> None:
        owned = self._rows.owned
        end = start + len(payload) // self._rows.token_bytes
        whole = Rectangle(owned.layer_start, owned.layer_end, start, end, owned.head_start, owned.head_end)
        self.scatter(whole, payload)
        self.grow([], max(self.written(), end))


class WrittenRank:
    def __init__(self, rows: TorchRows) -> None:
        self._rows = rows

    def request(self, slots: Sequence[int]) -> KvRequest:
        return WrittenRequest(self._rows, slots)


class TorchSuite(KvTransferSuite):
    dtype: str

    def make_rank(self, owned: Rectangle, slots: int) -> WrittenRank:
        kind = getattr(torch, self.dtype)
        shape = (slots, owned.heads, HEAD_DIM)
        buffers = [(torch.zeros(shape, dtype=kind), torch.zeros(shape, dtype=kind)) for _ in range(owned.layers)]
        return WrittenRank(TorchRows(buffers, owned))


class TestFloat32(TorchSuite):
    dtype, row_bytes = "float32", 4 * HEAD_DIM


class TestBfloat16(TorchSuite):
    dtype, row_bytes = "bfloat16", 2 * HEAD_DIM


class TestFloat16(TorchSuite):
    dtype, row_bytes = "float16", 2 * HEAD_DIM
