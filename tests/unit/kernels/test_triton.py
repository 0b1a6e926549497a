"""The Triton kernels, interpreted: in a process where nothing has imported Triton before."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

CASES = Path(__file__).with_name("interpreted_triton.py")


@pytest.mark.slow
def test_interpreted() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 passed" in done.stdout


@pytest.mark.parametrize("decodes", [True, False], ids=["decode", "prefill"])
def test_compiled_for_a_gpu(decodes: bool) -> None:
    """Without one: as far as an assembler goes. Keys and values are loaded 16 bytes at once."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from meshift.kernels import triton_attention as kernels

    constants = {
        "group": 4, "dim": 128, "padded": 128, "row_count": 16 if decodes else 64, "query_tile": 1 if decodes else 16,
        "tile": kernels.BLOCK_TOKENS, "part_tokens": kernels.PART_TOKENS, "split": decodes, "element": tl.bfloat16,
        "factor": tl.bfloat16, "alignment": kernels.ALIGNMENT,
    }  # fmt: skip
    scratch = "*fp32" if decodes else "*bf16"
    types = {
        "query": "*bf16", "out": "*bf16", "part_sums": scratch, "part_tops": scratch, "part_totals": scratch,
        "pages": "*i64", "starts": "*i64", "lengths": "*i64", "slots": "*i32", "rows": "*i64", "scale": "fp32",
    }  # fmt: skip
    names = kernels._attend.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i64") for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(ASTSource(kernels._attend, signature, places), target=GPUTarget("cuda", 90, 32))
    widest = re.findall(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", compiled.asm["ptx"])
    assert len(widest) >= 16
    assert "mma" in compiled.asm["ptx"]
    assert len(compiled.asm["cubin"]) > 0
