"""What an operator sees of a mesh of processes: one trace over all services, and metrics of each."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from meshift.benchmarks.mesh_process import MeshProcess, running_mesh
from meshift.services.cli.model import SMALL_MODEL
from meshift.services.cli.paths import models_folder
from meshift.tracing import names
from meshift.tracing.setup import TRACE_FILE_VARIABLE

pytestmark = [pytest.mark.nats, pytest.mark.slow, pytest.mark.timeout(240)]

DEADLINE_S = 60.0
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"
CHAT = {"model": SMALL_MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}


async def test_a_trace_and_metrics_span_all_services(tmp_path: Path) -> None:
    if not (models_folder() / SMALL_MODEL / "config.json").exists():
        pytest.skip("the small model isn't prepared: `meshift model prepare`")
    trace_file = tmp_path / "traces.jsonl"
    settings = {
        TRACE_FILE_VARIABLE: str(trace_file),
        "MESHIFT_MODELS": str(models_folder()),
        "MESHIFT_SIM_SPEED": "20",
    }
    async with (
        running_mesh(tmp_path / "mesh", "--engine", "sim", "--metrics", settings=settings) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=DEADLINE_S) as rest,
    ):
        answer = await rest.post("/v1/chat/completions", json=CHAT, headers={"traceparent": TRACEPARENT})
        assert answer.status_code == 200, answer.text
        await check_metrics(mesh)
    check_trace(trace_file)


async def check_metrics(mesh: MeshProcess) -> None:
    urls = mesh.state().metrics
    assert set(urls) == {"frontend", "scheduler", "coordinator", "worker-1"}
    texts = {}
    async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
        for name, url in urls.items():
            texts[name] = (await client.get(url)).text
    values: dict[Any, float] = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for text in texts.values()
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert values["meshift_streams_ended_total", ("reason", "length")] == 1
    assert values["meshift_http_requests_total", ("route", "/v1/chat/completions"), ("status", "200")] == 1
    assert values["meshift_dispatches_total", ("decision", "fits")] == 1
    assert values["meshift_requests_ended_total", ("instance_id", "worker-1"), ("reason", "length")] == 1
    services = {dict(key[1:])["service"] for key in values if key[0] == "meshift_bus_received_total"}
    assert services == {"frontend", "scheduler", "coordinator", "worker"}


def check_trace(trace_file: Path) -> None:
    spans = [json.loads(line) for line in trace_file.read_text().splitlines()]
    mine = [span for span in spans if span["context"]["trace_id"] == f"0x{TRACE_ID}"]
    by_name = {span["name"]: span for span in mine}
    assert len(by_name) == len(mine), "one request, nothing twice"
    services = {name: span["resource"]["attributes"]["service.name"] for name, span in by_name.items()}
    request = names.request_span("chat", SMALL_MODEL)
    http = "POST /v1/chat/completions"
    assert services == {
        **dict.fromkeys((http, request, names.DISPATCH, names.SUBMIT), "meshift-frontend"),
        names.DECIDE: "meshift-scheduler",
        **dict.fromkeys((names.GENERATE, names.QUEUE, names.PREFILL, names.DECODE), "meshift-worker"),
    }
    parents = {
        request: http,
        names.DISPATCH: request,
        names.DECIDE: names.DISPATCH,
        names.SUBMIT: request,
        names.GENERATE: names.SUBMIT,
        **dict.fromkeys((names.QUEUE, names.PREFILL, names.DECODE), names.GENERATE),
    }
    for name, parent in parents.items():
        assert by_name[name]["parent_id"] == by_name[parent]["context"]["span_id"], name
    assert by_name[http]["parent_id"] == "0xb7ad6b7169203331"
