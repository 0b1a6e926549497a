"""Fixtures of the text tests."""

from pathlib import Path

import pytest

from meshift.services.frontend.text.tokenizer import ChatTokenizer
from tests.unit.frontend.text.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> ChatTokenizer:
    """Its tokeniser."""
    return ChatTokenizer.load(tiny_folder)
