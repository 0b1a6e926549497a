"""How an instance of SGLang is to be started."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from meshift.kv_memory.transport.base import DataTransport

LogLevel = Literal["debug", "info", "warning", "error"]


class SglangSettings(BaseModel):
    """Settings of one instance. What isn't set is chosen for the device; `extra_server_args` wins over all."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model_path: Path
    """A Hugging Face checkpoint folder, with tokenizer."""
    model_name: str
    """The id in `/v1/models`."""
    log_dir: Path
    """The ranks' output goes to `<instance_name>-rank<N>.log` here."""
    instance_name: str = "sglang"
    device: Literal["cpu", "cuda"] | None = None
    """None: cuda if the host has a driver for it."""
    tensor_ranks: int = Field(default=1, ge=1)
    pipeline_stages: int = Field(default=1, ge=1)
    layer_partition: tuple[int, ...] | None = None
    """Layers of each stage; None: as even as possible."""
    movable_layers: bool | None = None
    """Whether layers can move between stages while it serves; None: with two stages and more, on a CPU."""
    layer_copies_bytes: int = Field(default=0, ge=0)
    """Host memory of each rank for weights of layers that it has had, to get them again without reading the
    checkpoint."""
    stage_bytes_max: int | None = Field(default=None, ge=1)
    """What each rank may take for weights and KV, a bound for plans of other layouts; None: there is none."""
    capacity_tokens: int | None = Field(default=8192, ge=16)
    """KV slots; None: SGLang sizes the pool by the free memory (not on a CPU, where other processes share it)."""
    capacity_tokens_max: int | None = Field(default=None, ge=16)
    """How far `resize_kv` may grow it; None: not beyond `capacity_tokens`."""
    layers_per_group: int | None = Field(default=None, ge=1)
    """Keep KV in units of so many stacked layers, each given back to the system by itself when the capacity shrinks
    (PipeLive's k; its default is 4). None: in SGLang's own buffers."""
    page_size: int = Field(default=1, ge=1)
    """Tokens a page; with `layers_per_group`, 1 means 16 on a CPU, and as many as fill a unit of 2 MiB on a GPU."""
    context_tokens_max: int | None = Field(default=None, ge=1)
    """Of prompt plus output; None: the model's own."""
    dtype: str | None = None
    """None: float32 on a CPU, else the checkpoint's."""
    attention_backend: str | None = None
    """By SGLang's name, or ours: `meshift_cpu` on a CPU, `meshift_triton` and `meshift_flash` on a GPU, with
    `layers_per_group`. None: `meshift_cpu` on a CPU (`torch_native` is SGLang's own), else SGLang's choice."""
    radix_cache: bool = True
    overlap: bool | None = None
    """SGLang's overlap scheduler; None: on CUDA with one stage. On a CPU it only delays each token by a step."""
    chunked_prefill_size: int | None = Field(default=None, ge=1)
    """Tokens of prefill a step; None: 512 on a CPU, else SGLang's choice."""
    max_running_requests: int | None = Field(default=None, ge=1)
    random_seed: int = 0
    threads_per_rank: int | None = Field(default=None, ge=1)
    """OpenMP threads on a CPU; None: the cores divided by the ranks."""
    data_host: str = "127.0.0.1"
    """The IP address of this host at which KV of requests arrives that move here; ports are the system's choice. The
    data plane is not encrypted: it must be an address in a trusted network."""
    data_transport: DataTransport = "tcp"
    """What KV travels by; the same at all instances between which requests move."""
    data_bytes_per_s: float | None = Field(default=None, gt=0.0)
    """What each rank sends at most of KV of requests that move away, all together; None: as fast as it goes."""
    verify_moves: bool = False
    """Compare the KV of each request that moves at both ends. For tests and debugging: it takes time while the request
    is frozen."""
    log_level: LogLevel = "info"
    start_timeout_s: float = Field(default=180.0, gt=0.0)
    extra_server_args: dict[str, Any] = Field(default_factory=dict)
    """Further `ServerArgs`, by SGLang's names."""

    @property
    def layers_move(self) -> bool:
        """What `movable_layers` comes to, but for the device."""
        return self.pipeline_stages > 1 if self.movable_layers is None else self.movable_layers

    @property
    def rank_count(self) -> int:
        """Processes of the instance."""
        return self.tensor_ranks * self.pipeline_stages

    @model_validator(mode="after")
    def _consistent(self) -> "SglangSettings":
        if self.layer_partition is not None and len(self.layer_partition) != self.pipeline_stages:
            raise ValueError(
                f"layer_partition names {len(self.layer_partition)} stages, pipeline_stages {self.pipeline_stages}"
            )
        if self.capacity_tokens_max is not None and self.capacity_tokens_max < (self.capacity_tokens or 0):
            raise ValueError("capacity_tokens_max is below capacity_tokens")
        if self.overlap and self.pipeline_stages > 1:
            raise ValueError("SGLang's overlap scheduler runs one stage only")
        return self
