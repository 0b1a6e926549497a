"""The numpy KV memory passes the KV transfer suite."""

from typing import Any, ClassVar

import numpy as np
import pytest

from meshift.kv_memory.matrix import MatrixKv
from meshift.kv_memory.rectangle import Rectangle
from tests.contract.kv_transfer_suite import KvRank, KvTransferSuite

HEAD_DIM = 3


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint8], scope="class")
class TestMatrixKv(KvTransferSuite):
    dtype: ClassVar[Any]

    @pytest.fixture(autouse=True)
    def element_type(self, dtype: Any) -> None:
        self.__class__.dtype = dtype
        self.__class__.row_bytes = HEAD_DIM * np.dtype(dtype).itemsize

    def make_rank(self, owned: Rectangle, slots: int) -> KvRank:
        return MatrixKv(owned, slots, HEAD_DIM, self.dtype)
