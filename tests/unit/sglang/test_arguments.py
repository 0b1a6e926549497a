"""From settings to SGLang's arguments and environment."""

from pathlib import Path
from typing import Any

import pydantic
import pytest

from meshift.backends.sglang.arguments import rank_environment, server_arguments
from meshift.backends.sglang.settings import SglangSettings


def settings(**fields: Any) -> SglangSettings:
    return SglangSettings(**{"model_path": "m", "model_name": "n", "log_dir": "logs", "device": "cpu", **fields})


def test_cpu_defaults() -> None:
    arguments = server_arguments(settings())
    assert arguments["device"] == "cpu"
    assert arguments["dtype"] == "float32"
    assert arguments["attention_backend"] == "meshift_cpu"
    assert arguments["sampling_backend"] == "pytorch"
    assert arguments["max_total_tokens"] == 8192
    assert arguments["disable_overlap_schedule"] is True
    assert "context_length" not in arguments


def test_what_is_set_wins_and_extra_wins_over_it() -> None:
    arguments = server_arguments(
        settings(
            dtype="bfloat16",
            overlap=True,
            attention_backend="torch_native",
            chunked_prefill_size=7,
            radix_cache=False,
            extra_server_args={"dtype": "x"},
        )
    )
    assert arguments["dtype"] == "x"
    assert arguments["disable_overlap_schedule"] is False
    assert arguments["attention_backend"] == "torch_native"
    assert arguments["chunked_prefill_size"] == 7
    assert arguments["disable_radix_cache"] is True


def test_cuda() -> None:
    arguments = server_arguments(settings(device="cuda", capacity_tokens=None))
    assert arguments["device"] == "cuda"
    assert arguments["disable_overlap_schedule"] is False
    assert not {"attention_backend", "dtype", "max_total_tokens"} & arguments.keys()
    environment = rank_environment(settings(device="cuda"), {})
    assert "MESHIFT_CPU_PLATFORM" not in environment
    assert environment["MESHIFT_ENGINE"] == "1"


def test_environment(tmp_path: Path) -> None:
    base = {"PATH": "p", "OMP_NUM_THREADS": "9"}
    chosen = settings(model_path=tmp_path, pipeline_stages=2, layer_partition=(5, 3), threads_per_rank=3)
    environment = rank_environment(chosen, base)
    expected = {
        "PATH": "p",
        "MESHIFT_ENGINE": "1",
        "MESHIFT_CPU_PLATFORM": "1",
        "SGLANG_PLATFORM": "meshift_cpu",
        "SGLANG_USE_PICKLE_IPC": "0",
        "SGLANG_PP_LAYER_PARTITION": "5,3",
        "OMP_NUM_THREADS": "3",
        "HF_HUB_OFFLINE": "1",
    }
    assert expected.items() <= environment.items()
    assert base == {"PATH": "p", "OMP_NUM_THREADS": "9"}


@pytest.mark.parametrize(
    "fields",
    [
        {"pipeline_stages": 2, "layer_partition": (8,)},
        {"pipeline_stages": 2, "overlap": True},
        {"tensor_ranks": 0},
        {"nonsense": 1},
    ],
)
def test_inconsistent_settings(fields: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError):
        settings(**fields)


def test_stacked_layers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 30}')
    chosen = settings(model_path=tmp_path, layers_per_group=4, pipeline_stages=2, capacity_tokens=320)
    assert server_arguments(chosen)["page_size"] == 16
    assert server_arguments(chosen.model_copy(update={"page_size": 32}))["page_size"] == 32
    environment = rank_environment(chosen, {})
    assert environment["MESHIFT_LAYERS_PER_GROUP"] == "4"
    assert environment["SGLANG_PP_LAYER_PARTITION"] == "16,14"
    assert "MESHIFT_KV_CAPACITY" not in environment
    own = rank_environment(chosen.model_copy(update={"layer_partition": (20, 10)}), {})
    assert own["SGLANG_PP_LAYER_PARTITION"] == "20,10"
    assert "SGLANG_PP_LAYER_PARTITION" not in rank_environment(settings(layers_per_group=4), {})


def test_room_to_grow() -> None:
    chosen = settings(capacity_tokens=320, capacity_tokens_max=640)
    assert server_arguments(chosen)["max_total_tokens"] == 640
    assert rank_environment(chosen, {})["MESHIFT_KV_CAPACITY"] == "320"
    with pytest.raises(pydantic.ValidationError, match="below"):
        settings(capacity_tokens=320, capacity_tokens_max=300)
