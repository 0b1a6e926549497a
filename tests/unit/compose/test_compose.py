"""The compose files against the code: settings that exist, images from one base, files that are there."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from pydantic import BaseModel

from meshift.schemas.limits import MESSAGE_BYTES_MAX
from meshift.services.cli.main import COMMANDS
from meshift.services.cli.paths import MODELS_VARIABLE
from meshift.services.coordinator.main import CoordinatorSettings
from meshift.services.frontend.main import FrontendSettings
from meshift.services.scheduler.main import SchedulerSettings
from meshift.services.worker.main import WorkerSettings

ROOT = Path(__file__).resolve().parents[3]
COMPOSE = ROOT / "compose"
BASE_IMAGE = "python:3.11-slim-bookworm"
SETTINGS: dict[str, type[BaseModel]] = {
    "frontend-1": FrontendSettings,
    "frontend-2": FrontendSettings,
    "scheduler": SchedulerSettings,
    "coordinator": CoordinatorSettings,
    "worker": WorkerSettings,
}
SET_IN_ENTRYPOINT = {"worker": ("MESHIFT_INSTANCE_ID", "MESHIFT_DATA_HOST")}
NO_SHELL_IN_IMAGE = {"otel-collector"}
"""Its image has no program that could ask it."""


def load(name: str) -> dict[str, Any]:
    content = yaml.safe_load((COMPOSE / name).read_text())
    assert isinstance(content, dict)
    return content


SERVICES: dict[str, dict[str, Any]] = load("docker-compose.yml")["services"]
GPU_SERVICES: dict[str, dict[str, Any]] = load("docker-compose.gpu.yml")["services"]
BUILT = sorted(name for name, service in SERVICES.items() if "build" in service)
PULLED = sorted(name for name, service in SERVICES.items() if "build" not in service)


def default_of(text: str) -> str:
    """A value as it is when nothing is set: `${NAME:-default}`."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def stages() -> dict[str, str]:
    """Stage -> what it is built from."""
    text = (COMPOSE / "Dockerfile").read_text()
    return {name: base for base, name in re.findall(r"^FROM (\S+) AS (\S+)$", text, re.MULTILINE)}


def test_every_image_comes_from_one_base() -> None:
    text = (COMPOSE / "Dockerfile").read_text()
    assert len(re.findall(r"^FROM ", text, re.MULTILINE)) == len(stages())
    for base in stages().values():
        assert base == BASE_IMAGE or base in stages()
    for source in re.findall(r"--from=(\S+)", text):
        assert source in stages()


@pytest.mark.parametrize("name", BUILT)
def test_built_services_use_a_stage_that_ends_as_an_ordinary_user(name: str) -> None:
    target = SERVICES[name]["build"]["target"]
    text = (COMPOSE / "Dockerfile").read_text()
    stage = text.partition(f" AS {target}\n")[2].partition("\nFROM ")[0]
    assert stage, target
    assert "USER meshift\n" in stage
    assert "PYTHONSAFEPATH=1" in text


def test_what_is_copied_exists_and_is_sent_to_the_engine() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for arguments in re.findall(r"^COPY (?!--from)(.+) \S+$", (COMPOSE / "Dockerfile").read_text(), re.MULTILINE):
        for source in arguments.split():
            assert (ROOT / source).exists(), source
            assert any(source == line[1:] or source.startswith(f"{line[1:]}/") for line in ignored if line[:1] == "!")


def test_every_room_is_in_the_wheel() -> None:
    copied = re.findall(r"^COPY (\S+) \1$", (COMPOSE / "Dockerfile").read_text(), re.MULTILINE)
    rooms = [path.name for path in (ROOT / "src" / "meshift").iterdir() if path.is_symlink()]
    assert set(rooms) <= set(copied)


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_every_variable_is_a_setting_and_its_default_is_valid(name: str) -> None:
    environment = dict(SERVICES[name]["environment"]) | GPU_SERVICES.get(name, {}).get("environment", {})
    ours = {key: value for key, value in environment.items() if key.startswith("MESHIFT_")}
    fields = SETTINGS[name].model_fields
    names = {*ours, *SET_IN_ENTRYPOINT.get(name, ())}
    assert {key.removeprefix("MESHIFT_").lower() for key in names} <= fields.keys()
    values = {key.removeprefix("MESHIFT_").lower(): default_of(str(value)) for key, value in ours.items()}
    SETTINGS[name].model_validate(values)
    assert all(key.startswith(("MESHIFT_", "OTEL_")) for key in environment)


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_commands_exist(name: str) -> None:
    service = SERVICES[name]
    words = " ".join(service.get("command", service.get("entrypoint", ())))
    assert set(words.split()) & COMMANDS.keys() == {name.partition("-")[0]}


def test_the_model_is_prepared_where_the_others_look_for_it() -> None:
    assert set(SERVICES["model"]["environment"]) == {MODELS_VARIABLE, "MODEL"}
    folder = SERVICES["model"]["environment"][MODELS_VARIABLE]
    model = SERVICES["worker"]["environment"]["MESHIFT_MODEL"]
    assert default_of(model) == f"{folder}/{default_of(SERVICES['model']['environment']['MODEL'])}"
    for name in ("model", "worker", "frontend-1", "frontend-2"):
        volumes = [default_of(volume).split(":")[:2] for volume in SERVICES[name]["volumes"]]
        assert ["models", folder] in volumes, name


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_every_service_is_watched_bounded_and_started_again(name: str) -> None:
    service = SERVICES[name]
    if name == "model":
        assert service["restart"] == "no"
        return
    assert service["restart"] == "unless-stopped"
    assert name in NO_SHELL_IN_IMAGE or service["healthcheck"]["test"]
    assert "mem_limit" in service


@pytest.mark.parametrize("name", PULLED)
def test_images_of_others_are_pinned_and_only_in_the_profile(name: str) -> None:
    assert re.search(r":v?\d+\.\d+\.\d+$", SERVICES[name]["image"])
    assert SERVICES[name]["profiles"] == ["observability"]


def test_services_get_the_time_that_they_take_to_stop() -> None:
    worker, frontend = SERVICES["worker"], SERVICES["frontend-1"]
    grace_s = float(default_of(worker["stop_grace_period"]).removesuffix("s"))
    assert grace_s > float(default_of(worker["environment"]["MESHIFT_DRAIN_DEADLINE_S"])) + 10
    grace_s = float(frontend["stop_grace_period"].removesuffix("s"))
    assert grace_s > float(frontend["environment"]["MESHIFT_GRACE_S"]) + 10


def test_only_the_proxy_and_the_tools_are_reachable_and_on_loopback_by_default() -> None:
    ports = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert set(ports) == {"proxy", "jaeger", "prometheus", "grafana"}
    for mapped in ports.values():
        assert all(default_of(port).startswith("127.0.0.1:") for port in mapped)


@pytest.mark.parametrize("name", ["docker-compose.yml", "docker-compose.gpu.yml", "docker-compose.autoscale.yml"])
def test_every_variable_is_told_of(name: str) -> None:
    variables = set(re.findall(r"\$\{(\w+)", (COMPOSE / name).read_text()))
    told = (ROOT / "docs" / "compose.md").read_text()
    assert variables
    assert not {variable for variable in variables if f"`{variable}`" not in told}


def test_docker_compose_1_reads_it() -> None:
    assert "name" not in load("docker-compose.yml")


def test_gpu_override_changes_services_that_exist() -> None:
    assert GPU_SERVICES.keys() <= SERVICES.keys()
    (device,) = GPU_SERVICES["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


def test_autoscale_override_sets_what_the_scheduler_knows_and_opens_the_bus_on_loopback_only() -> None:
    services = load("docker-compose.autoscale.yml")["services"]
    assert services.keys() <= SERVICES.keys()
    assert [port.split(":")[0] for port in services["nats"]["ports"]] == ["127.0.0.1"]
    prefix = "MESHIFT_SCHEDULING__SCALING__"
    values = {key: default_of(value) for key, value in services["scheduler"]["environment"].items()}
    assert all(key.startswith(prefix) for key in values)
    scaling = {key.removeprefix(prefix).lower(): value for key, value in values.items()}
    settings = SchedulerSettings.model_validate({"scheduling": {"scaling": scaling}}).scheduling.scaling
    assert (settings.enabled, settings.dry_run, settings.instances_min, settings.instances_max) == (True, False, 1, 4)


def test_mounted_files_exist_and_are_yaml() -> None:
    for name in PULLED:
        for volume in SERVICES[name].get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (COMPOSE / source).exists(), source
    for path in COMPOSE.rglob("*.yml"):
        assert yaml.safe_load(path.read_text()), path


def test_nats_takes_messages_as_large_as_the_mesh_sends() -> None:
    text = (COMPOSE / "nats.conf").read_text()
    assert re.search(rf"^max_payload: {MESSAGE_BYTES_MAX}$", text, re.MULTILINE)


def test_proxy_and_prometheus_name_services_that_exist() -> None:
    servers = re.findall(r"^    server (\S+) (\S+):(\d+)$", (COMPOSE / "haproxy.cfg").read_text(), re.MULTILINE)
    frontends = {name for name in SERVICES if name.startswith("frontend-")}
    assert {host for _, host, _ in servers} == frontends
    assert {port for _, _, port in servers} == {SERVICES["frontend-1"]["environment"]["MESHIFT_PORT"]}
    for job in load("prometheus.yml")["scrape_configs"]:
        targets = [target for group in job.get("static_configs", ()) for target in group["targets"]]
        hosts = {target.split(":")[0] for target in targets}
        hosts |= {name for group in job.get("dns_sd_configs", ()) for name in group["names"]}
        assert hosts - {"127.0.0.1"} <= SERVICES.keys()


def test_collector_pipelines_use_parts_that_are_configured() -> None:
    config = load("otel-collector.yml")
    for pipeline in config["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= config[kind].keys()
    assert set(config["service"]["extensions"]) <= config["extensions"].keys()
