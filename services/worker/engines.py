"""Builds the engine that the settings ask for. An engine is imported when it is asked for: the simulated one needs no
torch."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from meshift.backends.base import Engine
from meshift.kv_memory.transport.base import DataTransport
from meshift.services.calibration.reading import CalibrationPath

if TYPE_CHECKING:
    from meshift.backends.sglang.settings import SglangSettings


class EngineSettings(BaseModel):
    """Settings of the engine, whichever it is."""

    instance_id: str = Field("worker-1", description="the instance's name: one live worker a name")
    model: Path = Field(Path("smollm2"), description="a Hugging Face model folder")
    model_name: str | None = Field(None, description="its name in the API (default: the folder's name)")
    pipeline_stages: int = Field(1, ge=1, description="stages of the instance's pipeline")
    layer_partition: tuple[int, ...] | None = Field(
        None, description="layers of each stage, such as 16,14; 30,0,0 keeps ranks for later. Without it: even"
    )
    stage_bytes_max: int | None = Field(
        None, ge=1, description="what a rank may take for weights and KV: a bound for other layouts"
    )
    layer_copies_bytes: int = Field(
        0, ge=0, description="host memory of each rank for weights of layers that have left it, to get them back soon"
    )
    tensor_ranks: int = Field(1, ge=1, description="tensor-parallel ranks of each stage")
    capacity_tokens: int = Field(16_384, ge=1, description="KV cache, in tokens")
    capacity_tokens_max: int | None = Field(None, ge=1, description="how far the KV cache may grow while it serves")
    layers_per_group: int | None = Field(
        None, ge=1, description="keep KV in units of so many layers, which go back when the cache shrinks"
    )
    page_size: int = Field(
        1, ge=1, description="tokens a page; 1 with --layers-per-group: 16 on a CPU, a unit of 2 MiB on a GPU"
    )
    attention_backend: str | None = Field(
        None,
        description="what computes attention: meshift_cpu (the default on a CPU), meshift_triton or meshift_flash (on "
        "a GPU, with --layers-per-group), or by SGLang's names, such as torch_native",
    )
    context_tokens_max: int | None = Field(None, ge=1, description="shorten the model's context")
    threads_per_rank: int | None = Field(
        None, ge=1, description="computing threads of a rank on a CPU; without it, the cores divided by the ranks"
    )
    prefix_cache: bool = Field(True, description="keep the KV of ended requests for prompts that begin alike")
    log_dir: Path = Field(Path(".meshift/logs"), description="where the ranks' logs go")
    start_timeout_s: float = Field(180.0, gt=0, description="time for the engine to come up")
    random_seed: int = Field(0, description="seed of unseeded sampling")
    data_host: str = Field(
        "127.0.0.1",
        description="IP address of this host at which KV of requests arrives that move here, at ports that the system "
        "chooses; it isn't encrypted, so: in a trusted network",
    )
    data_transport: DataTransport = Field(
        "tcp",
        description="what KV that moves travels by, the same at all workers; "
        "nixl (UCX: NVLink, RDMA) must be installed",
    )
    data_bytes_per_s: float | None = Field(
        None, gt=0, description="what each rank sends of moving requests at most; without it, as fast as it goes"
    )
    calibration: CalibrationPath = Field(
        None,
        description="file of `meshift calibrate`: headroom of priority classes; of a simulated engine, its speed too",
    )
    sim_speed: float = Field(1.0, gt=0, description="sim engine: how much faster than the modelled hardware")


def build_engine(engine: str, settings: EngineSettings) -> Engine:
    """An engine that isn't started yet. Raises ValueError for an unknown name."""
    if engine == "sglang":
        return _sglang(settings)
    if engine == "sim":
        return _sim(settings)
    raise ValueError(f"unknown engine {engine!r}: sglang or sim")


def _sglang(settings: EngineSettings) -> Engine:
    from meshift.backends.sglang.engine import SglangEngine

    return SglangEngine(sglang_settings(settings))


def sglang_settings(settings: EngineSettings) -> "SglangSettings":
    """What the real engine is started with."""
    from meshift.backends.sglang.settings import SglangSettings

    return SglangSettings(
        model_path=settings.model,
        model_name=settings.model_name or settings.model.name,
        log_dir=settings.log_dir,
        instance_name=settings.instance_id,
        pipeline_stages=settings.pipeline_stages,
        tensor_ranks=settings.tensor_ranks,
        layer_partition=settings.layer_partition,
        stage_bytes_max=settings.stage_bytes_max,
        layer_copies_bytes=settings.layer_copies_bytes,
        capacity_tokens=settings.capacity_tokens,
        capacity_tokens_max=settings.capacity_tokens_max,
        layers_per_group=settings.layers_per_group,
        page_size=settings.page_size,
        attention_backend=settings.attention_backend,
        context_tokens_max=settings.context_tokens_max,
        threads_per_rank=settings.threads_per_rank,
        radix_cache=settings.prefix_cache,
        data_transport=settings.data_transport,
        data_bytes_per_s=settings.data_bytes_per_s,
        start_timeout_s=settings.start_timeout_s,
        random_seed=settings.random_seed,
        data_host=settings.data_host,
    )


def _sim(settings: EngineSettings) -> Engine:
    from meshift.backends.sim.engine import DEFAULT_MODEL, SimEngine
    from meshift.backends.sim.parameters import SimParameters
    from meshift.backends.sim.pipeline import SimPipeline
    from meshift.kv_memory.transport import TransportLimits, create_transport
    from meshift.services.calibration.file import load_calibration

    update = {"name": settings.model_name or settings.model.name, "path": str(settings.model)}
    model = DEFAULT_MODEL.model_copy(update=update | _vocabulary(settings.model))
    measured = SimParameters() if settings.calibration is None else load_calibration(settings.calibration).parameters
    parameters = measured.model_copy(update={"capacity": settings.capacity_tokens}).faster(settings.sim_speed)
    limits = TransportLimits(bytes_per_s=settings.data_bytes_per_s)
    pipeline = SimPipeline.even(settings.pipeline_stages, model.layers, settings.layers_per_group or 4)
    return SimEngine(
        parameters,
        model,
        transport=create_transport("tcp", location=settings.data_host, limits=limits),
        pipeline=pipeline.faster(settings.sim_speed),
    )


def _vocabulary(model: Path) -> dict[str, int]:
    """The size of a model folder's vocabulary: the tokenizer of the folder must know what the engine makes up."""
    config = model / "config.json"
    return {"vocabulary_size": json.loads(config.read_text())["vocab_size"]} if config.exists() else {}
