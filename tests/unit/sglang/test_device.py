"""What the device decides: pages that fill a GPU's units, attention backends that can serve, what is said if not."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshift.backends.base import EngineStartError
from meshift.backends.sglang.arguments import rank_environment, server_arguments
from meshift.backends.sglang.engine import SglangEngine
from meshift.backends.sglang.settings import SglangSettings
from meshift.kv_memory.stacking import CUDA_UNIT_BYTES
from tests.contract.engine_kit import CollectingListener

LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
QWEN_3B = LLAMA_8B | {"num_attention_heads": 16, "num_key_value_heads": 2, "hidden_size": 2048}
ODD = LLAMA_8B | {"num_key_value_heads": 3, "head_dim": 80}


def settings(folder: Path, config: dict[str, Any] = LLAMA_8B, **fields: Any) -> SglangSettings:
    (folder / "config.json").write_text(json.dumps(config))
    return SglangSettings(
        **{
            "model_path": folder,
            "model_name": "n",
            "log_dir": folder,
            "device": "cuda",
            "layers_per_group": 4,
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("config", "k", "tensor_ranks", "tokens"),
    [(LLAMA_8B, 4, 1, 128), (LLAMA_8B, 1, 1, 512), (LLAMA_8B, 4, 4, 512), (QWEN_3B, 4, 1, 512), (ODD, 4, 1, 8192)],
)
def test_a_page_fills_a_unit(tmp_path: Path, config: dict[str, Any], k: int, tensor_ranks: int, tokens: int) -> None:
    chosen = settings(tmp_path, config, layers_per_group=k, tensor_ranks=tensor_ranks)
    assert server_arguments(chosen)["page_size"] == tokens
    heads = config["num_key_value_heads"] // tensor_ranks
    head_dim = config.get("head_dim", 128)
    assert tokens * k * 2 * heads * head_dim * 2 % CUDA_UNIT_BYTES == 0
    environment = rank_environment(chosen, {})
    assert (environment["MESHIFT_CUDA_PLATFORM"], environment["MESHIFT_LAYERS_PER_GROUP"]) == ("1", str(k))
    assert "MESHIFT_CPU_PLATFORM" not in environment


def test_pages_for_flash_attention(tmp_path: Path) -> None:
    chosen = settings(tmp_path, attention_backend="meshift_flash")
    arguments = server_arguments(chosen)
    assert (arguments["page_size"], arguments["attention_backend"]) == (256, "meshift_flash")
    assert arguments["disable_cuda_graph"] is True
    with pytest.raises(ValueError, match=r"multiple of 256, not 128: page_size=256 works, or .*meshift_triton"):
        server_arguments(chosen.model_copy(update={"page_size": 128}))
    assert server_arguments(chosen.model_copy(update={"page_size": 512}))["page_size"] == 512


def test_triton(tmp_path: Path) -> None:
    arguments = server_arguments(settings(tmp_path, attention_backend="meshift_triton"))
    assert (arguments["page_size"], arguments["disable_cuda_graph"]) == (128, True)
    assert "disable_cuda_graph" not in server_arguments(settings(tmp_path, attention_backend="fa3"))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"device": "cpu", "attention_backend": "meshift_triton"}, "needs a GPU; .*meshift_cpu"),
        ({"device": "cpu", "attention_backend": "meshift_flash"}, "needs a GPU"),
        ({"attention_backend": "meshift_cpu"}, "is for CPUs; .*meshift_triton"),
        ({"attention_backend": "meshift_flash", "layers_per_group": None}, "set layers_per_group=4"),
    ],
)
def test_what_cannot_serve(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        server_arguments(settings(tmp_path, **fields))


async def test_a_start_with_such_settings_fails_with_the_reason(tmp_path: Path) -> None:
    engine = SglangEngine(settings(tmp_path, device="cpu", attention_backend="meshift_flash"))
    with pytest.raises(EngineStartError, match="needs a GPU"):
        await engine.start(CollectingListener())
    await engine.stop(1.0)
