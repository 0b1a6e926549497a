"""Fixtures of the HTTP tests."""

from functools import partial
from pathlib import Path

import pytest

from meshift.services.frontend.text.tokenizer import ChatTokenizer
from tests.unit.frontend.http.harness import MakeShell, Shell, make_shell
from tests.unit.frontend.text.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> ChatTokenizer:
    """Its tokeniser."""
    return ChatTokenizer.load(tiny_folder)


@pytest.fixture
def make(tiny_folder: Path, tiny: ChatTokenizer) -> MakeShell:
    """Makes applications: `make(body_bytes_max=...)`."""
    return partial(make_shell, tiny_folder, tiny)


@pytest.fixture
def shell(make: MakeShell) -> Shell:
    """An application with default settings."""
    return make()


@pytest.fixture(scope="session")
def refusing(tiny_folder: Path, tiny: ChatTokenizer) -> Shell:
    """An application for all tests in which no request gets through to the core: it is the same after each."""
    return make_shell(tiny_folder, tiny)
