"""What meshift does on a GPU, tried on the GPU of this machine: the tests in `tests/gpu`, then some speeds.

    make gpu                                        # in the project's environment
    PYTHONPATH=src python3 scripts/gpu.py           # in any that has torch, triton, cuda-bindings, pytest

`--json FILE` keeps the figures. The exit status is that of the tests; 2 if there is no GPU. Tests that need SGLang or
flash-attn say that they are skipped where those aren't installed."""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
UNITS = 256
ROUNDS = 20
LAYERS, K = 8, 4
HEADS, QUERY_HEADS, DIM = 8, 32, 128
"""Of Llama-3-8B."""
DECODES = ((8, 1024), (32, 2048))
PREFILLS = (1024,)


def main() -> int:
    """Run it all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(".")[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--no-tests", action="store_true", help="speeds only")
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: nothing was tried")
        return 2
    print(f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, torch {torch.__version__}")
    status = 0 if arguments.no_tests else run_tests()
    result = {"device": torch.cuda.get_device_name(), "tests_passed": status == 0}
    for measure in (measure_arena, measure_copies, measure_attention):
        try:
            figures = measure()
        except Exception as error:  # What one of them can't do is a result, too.
            figures = {f"{measure.__name__} failed": f"{type(error).__name__}: {error}"}
            status = status or 1
        for name, value in figures.items():
            print(f"{name:<44} {value}")
        result |= figures
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    print("all passed" if status == 0 else "FAILED: see above")
    return status


def run_tests() -> int:
    """By an empty configuration: the project's names plugins that may be missing here."""
    command = (sys.executable, "-m", "pytest", "-c", "/dev/null", f"--rootdir={ROOT}", "--import-mode=importlib")
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", "-rA", "-q", str(ROOT / "tests" / "gpu")], check=False
    ).returncode


def gpu_ms(run: Callable[[], object]) -> float:
    """Median of some rounds, by the GPU's own clock."""
    import torch

    times = []
    for number in range(ROUNDS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if number >= 3:
            times.append(begin.elapsed_time(end))
    return float(statistics.median(times))


def measure_arena() -> dict[str, Any]:
    """Units of 2 MiB, taken and given back one by one."""
    import time

    import torch

    from meshift.kv_memory.arena.cuda import CudaArena, CudaVirtualMemory
    from meshift.kv_memory.stacking import CUDA_UNIT_BYTES

    torch.zeros(1, device="cuda")
    arena = CudaArena(CudaVirtualMemory(torch.cuda.current_device()), UNITS, CUDA_UNIT_BYTES)
    before, _ = torch.cuda.mem_get_info()
    begin = time.perf_counter()
    arena.commit(range(UNITS))
    committed = time.perf_counter()
    full, _ = torch.cuda.mem_get_info()
    arena.release(range(0, UNITS, 2))
    released = time.perf_counter()
    half, _ = torch.cuda.mem_get_info()
    arena.close()
    return {
        "arena: commit us a unit": round((committed - begin) / UNITS * 1e6, 1),
        "arena: release us a unit": round((released - committed) / (UNITS // 2) * 1e6, 1),
        "arena: share of memory that came": round((before - full) / (UNITS * CUDA_UNIT_BYTES), 3),
        "arena: share of memory that went": round((half - full) / (UNITS // 2 * CUDA_UNIT_BYTES), 3),
    }


def memory_of(tokens: int) -> tuple[Any, list[Any], Any]:
    """An arena with so many tokens in stacked layers, the layers' places, and a table of slots in random pages."""
    import torch

    from meshift.kernels.places import KvPlace
    from meshift.kv_memory.arena.cuda import CudaArena, CudaVirtualMemory, device_bytes
    from meshift.kv_memory.stacking import CUDA_UNIT_BYTES, Stacking

    sizes = {"heads": HEADS, "head_dim": DIM, "element_bytes": 2}
    stacking = Stacking(layers=LAYERS, **sizes, layers_per_group=K, unit_bytes=CUDA_UNIT_BYTES)
    count = -(-tokens // stacking.page_tokens)
    arena = CudaArena(CudaVirtualMemory(torch.cuda.current_device()), count * stacking.groups, CUDA_UNIT_BYTES)
    arena.commit(range(arena.units))
    device_bytes(arena, torch.cuda.current_device()).view(torch.bfloat16).normal_()
    places = []
    for layer in range(LAYERS):
        first = stacking.group_of(layer) * count
        places.append(
            KvPlace(
                pages=torch.tensor(arena.addresses(range(first, first + count)).tolist(), device="cuda"),
                page_tokens=stacking.page_tokens,
                key_offset=stacking.key_offset(layer),
                value_offset=stacking.value_offset(layer),
                token_stride=stacking.token_stride,
                head_stride=DIM * 2,
                slots=count * stacking.page_tokens,
                heads=HEADS,
                head_dim=DIM,
                dtype=torch.bfloat16,
            )
        )
    pages = torch.randperm(count, device="cuda", dtype=torch.int32)[:, None] * stacking.page_tokens
    slots = (pages + torch.arange(stacking.page_tokens, device="cuda", dtype=torch.int32)).view(-1)
    return arena, places, slots


def measure_copies() -> dict[str, Any]:
    """Gather and scatter of all layers, bytes read and written."""
    import torch

    from meshift.kernels import triton_attention

    arena, places, slots = memory_of(4096)
    found = slots[:4096].long()
    staging = torch.empty(LAYERS, 4096, 2, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    gather = gpu_ms(lambda: triton_attention.gather_places(places, found, staging))
    scatter = gpu_ms(lambda: triton_attention.scatter_places(staging, found, places))
    gigabytes = 2 * staging.nbytes / 1e9
    arena.close()
    return {
        "gather GB/s": round(gigabytes / gather * 1e3, 1),
        "scatter GB/s": round(gigabytes / scatter * 1e3, 1),
    }


def measure_attention() -> dict[str, Any]:
    """Decode steps and prefills over the table of addresses; the same kernel on plain buffers; torch's own there."""
    figures: dict[str, Any] = {}
    for sequences, tokens in DECODES:
        figures |= attention_figures(f"decode {sequences} x {tokens}", sequences, tokens, 1)
    for tokens in PREFILLS:
        figures |= attention_figures(f"prefill {tokens}", 1, tokens, tokens)
    return figures


def attention_figures(name: str, sequences: int, tokens: int, queries: int) -> dict[str, Any]:
    """Milliseconds of one layer, and how far the results are from torch's."""
    import torch
    import torch.nn.functional as functional

    from meshift.kernels import triton_attention
    from meshift.kernels.attention import AttentionBatch
    from meshift.kernels.places import KvPlace

    arena, places, slots = memory_of(sequences * tokens)
    place = places[1]
    table = slots[: sequences * tokens].view(sequences, tokens)
    counts = torch.arange(sequences + 1, device="cuda") * queries
    lengths, rows = torch.full((sequences,), tokens, device="cuda"), torch.arange(sequences, device="cuda")
    batch = AttentionBatch(counts, lengths, table, rows)
    query = torch.randn(sequences * queries, QUERY_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(query)
    scale = DIM**-0.5
    ours = gpu_ms(lambda: triton_attention.attend(query, place, batch, out, scale, queries, tokens))
    content = torch.empty(1, table.numel(), 2, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    triton_attention.gather_places([place], table.reshape(-1).long(), content)
    key, value = content[0, :, 0].contiguous(), content[0, :, 1].contiguous()
    in_order = torch.arange(table.numel(), device="cuda", dtype=torch.int32).view(sequences, tokens)
    plain, plain_batch = KvPlace.of_buffers(key, value).to("cuda"), AttentionBatch(counts, lengths, in_order, rows)
    plain_out = torch.empty_like(query)
    contiguous = gpu_ms(lambda: triton_attention.attend(query, plain, plain_batch, plain_out, scale, queries, tokens))
    keys, values = (part.view(sequences, tokens, HEADS, DIM).transpose(1, 2) for part in (key, value))
    asked = query.view(sequences, queries, QUERY_HEADS, DIM).transpose(1, 2)

    def native() -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            asked, keys, values, is_causal=queries > 1, enable_gqa=True, scale=scale
        )

    expected = native().transpose(1, 2).reshape_as(out)
    error = float((out - expected).abs().max())
    assert error < 3e-2, f"{name}: off by {error}"
    torch_ms = gpu_ms(native)
    arena.close()
    return {
        f"{name}: table ms a layer": round(ours, 4),
        f"{name}: table over contiguous": round(ours / contiguous, 3),
        f"{name}: over torch's (contiguous)": round(ours / torch_ms, 2),
        f"{name}: largest error": round(error, 4),
    }


if __name__ == "__main__":
    sys.exit(main())
