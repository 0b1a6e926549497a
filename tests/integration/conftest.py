"""Meshes of processes that several files share."""

from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from meshift.benchmarks.mesh_process import MeshProcess, running_mesh
from meshift.client.mesh import MeshClient
from meshift.services.cli.model import SMALL_MODEL
from meshift.services.cli.paths import models_folder
from meshift.tracing.setup import TRACE_FILE_VARIABLE

TRACES = "traces.jsonl"
"""In the state folder: `scripts/draw_move.py` draws a move from it."""


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def sglang_mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MeshProcess]:
    """Two SGLang workers on SmolLM2. Whoever kills or drains one leaves when two are ready again."""
    folder = models_folder() / SMALL_MODEL
    if not (folder / "config.json").exists():
        pytest.skip("the small model isn't prepared: `meshift model prepare smollm2`")
    state_dir = tmp_path_factory.mktemp("sglang-mesh")
    settings = {"MESHIFT_CAPACITY_TOKENS": "4096", TRACE_FILE_VARIABLE: str(state_dir / TRACES)}
    async with running_mesh(state_dir, "--workers", "2", "--model", str(folder), settings=settings) as running:
        yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def sglang_rest(sglang_mesh: MeshProcess) -> AsyncIterator[httpx.AsyncClient]:
    """Its REST API."""
    async with httpx.AsyncClient(base_url=sglang_mesh.url, timeout=200.0) as client:
        yield client


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def sglang_admin(sglang_mesh: MeshProcess) -> AsyncIterator[MeshClient]:
    """Its operators' API."""
    async with MeshClient(sglang_mesh.url) as client:
        yield client
