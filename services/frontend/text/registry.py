"""Which tokeniser belongs to which model."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path

from meshift.schemas.instances import ModelInfo
from meshift.services.frontend.text.tokenizer import ChatTokenizer, TokenizerError

TOKENIZERS_MAX = 32
"""Tokenisers in memory at once; the one that was not used for the longest time makes room."""


class TokenizerRegistry:
    """Loads tokenisers by `ModelInfo.path` and keeps them. Safe to use from several threads.

    `folders` names folders by model name, for services that see the model files elsewhere than the worker does.
    """

    def __init__(
        self,
        folders: Mapping[str, Path] | None = None,
        *,
        load: Callable[[Path], ChatTokenizer] = ChatTokenizer.load,
    ) -> None:
        self._folders = dict(folders or {})
        self._load = load
        self._loaded: OrderedDict[Path, ChatTokenizer] = OrderedDict()
        self._lock = threading.Lock()
        self._loading = threading.Lock()

    def cached(self, model: ModelInfo) -> ChatTokenizer | None:
        """The model's tokeniser if it is in memory; never blocks for long."""
        folder = self._folder(model)
        with self._lock:
            tokenizer = self._loaded.get(folder)
            if tokenizer is not None:
                self._loaded.move_to_end(folder)
            return tokenizer

    def get(self, model: ModelInfo) -> ChatTokenizer:
        """The model's tokeniser, loaded if need be, once. Blocks while it loads. Raises `TokenizerError`; a failure is
        not remembered, so a folder that appears later is found."""
        cached = self.cached(model)
        if cached is not None:
            return cached
        with self._loading:  # one load at a time, and callers of one model share it
            cached = self.cached(model)
            return cached if cached is not None else self._add(self._folder(model))

    def _add(self, folder: Path) -> ChatTokenizer:
        tokenizer = self._load(folder)
        with self._lock:
            self._loaded[folder] = tokenizer
            if len(self._loaded) > TOKENIZERS_MAX:
                self._loaded.popitem(last=False)
        return tokenizer

    def _folder(self, model: ModelInfo) -> Path:
        if model.name in self._folders:
            return self._folders[model.name]
        if not model.path:
            raise TokenizerError(f"model {model.name!r} names no folder, and no tokenizer folder is configured for it")
        return Path(model.path)
