"""Paths, and the state file by which commands find a mesh."""

import os
from pathlib import Path

import pytest

from meshift.services.cli.errors import CommandError
from meshift.services.cli.find import NATS_URL_DEFAULT, URL_DEFAULT, BusClientSettings, RestClientSettings
from meshift.services.cli.paths import CHECKOUT_MARK, checkout_root, models_folder, state_folder
from meshift.services.cli.state import ClusterState, only_mesh_here, process_start, read_state, write_state


def running(**changes: object) -> ClusterState:
    """The state of a mesh run by this very process."""
    own = os.getpid()
    fields = {
        "pid": own, "pid_start": process_start(own), "url": "http://127.0.0.1:9000", "model": "m",
        "nats_url": "nats://127.0.0.1:9001", "pids": {"worker-1": 7},
    }  # fmt: skip
    return ClusterState.model_validate({**fields, **changes})


def test_a_running_mesh_is_found(tmp_path: Path) -> None:
    assert read_state(tmp_path) is None
    write_state(tmp_path, running())
    assert read_state(tmp_path) == running()
    assert RestClientSettings(url=None, state_dir=tmp_path).rest_url() == "http://127.0.0.1:9000"
    assert BusClientSettings(nats=None, state_dir=tmp_path).nats_url() == "nats://127.0.0.1:9001"
    assert RestClientSettings(url="http://elsewhere/", state_dir=tmp_path).rest_url() == "http://elsewhere"


def test_metrics_of_the_mesh_that_is_asked(tmp_path: Path) -> None:
    urls = {"worker-1": "http://127.0.0.1:9002/metrics"}
    assert BusClientSettings(nats=None, state_dir=tmp_path).metrics_urls() == {}
    write_state(tmp_path, running(metrics=urls))
    for nats, shown in ((None, urls), ("nats://127.0.0.1:9001", urls), ("nats://elsewhere", {})):
        assert BusClientSettings(nats=nats, state_dir=tmp_path).metrics_urls() == shown


@pytest.mark.parametrize("changes", [{"pid_start": 1}, {"pid": 2**22 + 1}])
def test_a_dead_mesh_is_not_found(tmp_path: Path, changes: dict[str, object]) -> None:
    write_state(tmp_path, running(**changes))
    assert read_state(tmp_path) is None
    assert RestClientSettings(url=None, state_dir=tmp_path).rest_url() == URL_DEFAULT
    assert BusClientSettings(nats=None, state_dir=tmp_path).nats_url() == NATS_URL_DEFAULT


@pytest.mark.parametrize("text", ["", "{}", "not json", '{"pid": "x"}'])
def test_a_broken_state_file_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "cluster.json").write_text(text)
    assert read_state(tmp_path) is None


def test_one_mesh_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    with only_mesh_here(folder):
        write_state(folder, running())
        with pytest.raises(CommandError, match=r"already at http://127\.0\.0\.1:9000"), only_mesh_here(folder):
            pass
        assert read_state(folder) is not None
    assert not (folder / "cluster.json").exists()
    with only_mesh_here(folder):
        pass


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHIFT_MODELS", raising=False)
    monkeypatch.setenv("MESHIFT_CACHE", str(tmp_path / "cache"))
    deep = tmp_path / "checkout" / "a" / "b"
    deep.mkdir(parents=True)
    assert checkout_root(deep) is None
    assert models_folder(deep) == tmp_path / "cache" / "models"
    assert state_folder(deep) == deep / ".meshift"
    mark = tmp_path / "checkout" / CHECKOUT_MARK
    mark.parent.mkdir(parents=True)
    mark.touch()
    assert models_folder(deep) == tmp_path / "checkout" / ".models"
    assert state_folder(deep) == tmp_path / "checkout" / ".meshift"
    monkeypatch.setenv("MESHIFT_MODELS", str(tmp_path / "mine"))
    assert models_folder(deep) == tmp_path / "mine"
