"""Which folder a model's tokeniser comes from, and that it is loaded once."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest

from meshift.services.frontend.text import registry as module
from meshift.services.frontend.text.registry import TokenizerRegistry
from meshift.services.frontend.text.tokenizer import ChatTokenizer, TokenizerError
from tests.unit.frontend.fake_frontend import model_info


class Loader:
    """Counts loads; returns a new object each time."""

    def __init__(self) -> None:
        self.folders: list[Path] = []
        self.error: TokenizerError | None = None
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, folder: Path) -> ChatTokenizer:
        self.folders.append(folder)
        assert self.gate.wait(5)
        if self.error is not None:
            raise self.error
        return cast(ChatTokenizer, object())


def test_a_model_s_own_folder_is_loaded_once() -> None:
    loader = Loader()
    registry = TokenizerRegistry(load=loader)
    model = model_info(path="/models/a")
    assert registry.cached(model) is None
    first = registry.get(model)
    assert registry.get(model_info("other", path="/models/a")) is first
    assert registry.cached(model) is first
    assert loader.folders == [Path("/models/a")]


def test_a_configured_folder_comes_first() -> None:
    loader = Loader()
    registry = TokenizerRegistry({"tiny": Path("/here")}, load=loader)
    registry.get(model_info(path="/there"))
    registry.get(model_info("other", path="/there"))
    assert loader.folders == [Path("/here"), Path("/there")]


def test_a_model_without_a_folder_is_an_error() -> None:
    with pytest.raises(TokenizerError, match="'tiny' names no folder"):
        TokenizerRegistry(load=Loader()).get(model_info(path=""))


def test_a_failure_is_tried_again() -> None:
    loader = Loader()
    loader.error = TokenizerError("not yet")
    registry = TokenizerRegistry(load=loader)
    with pytest.raises(TokenizerError, match="not yet"):
        registry.get(model_info(path="/a"))
    loader.error = None
    registry.get(model_info(path="/a"))
    assert len(loader.folders) == 2


def test_callers_that_come_together_share_one_load() -> None:
    loader = Loader()
    loader.gate.clear()
    registry = TokenizerRegistry(load=loader)
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(registry.get, model_info(path="/a")) for _ in range(4)]
        loader.gate.set()
        assert len({id(future.result(5)) for future in futures}) == 1
    assert len(loader.folders) == 1


def test_the_one_that_was_not_used_for_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOKENIZERS_MAX", 2)
    registry = TokenizerRegistry(load=Loader())
    first, second, third = (model_info(path=f"/{name}") for name in "abc")
    registry.get(first)
    registry.get(second)
    assert registry.cached(first) is not None
    registry.get(third)
    assert registry.cached(second) is None
    assert registry.cached(first) is not None
