"""Output that obeys a JSON schema: SGLang's xgrammar backend, with bounds, and grammars that know of earlier output."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject, register_grammar_backend
from sglang.srt.constrained.xgrammar_backend import TokenizerNotSupportedError, XGrammarGrammarBackend
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from meshift.backends.sglang.plugin.compiler import JsonCompiler
from meshift.backends.sglang.plugin.overdue import CompilerThreads

BACKEND = "xgrammar"
GRAMMARS_MAX = 64
"""Compiled grammars kept; the least recently used goes first. SGLang keeps all of them."""

COMPILED_BYTES_MAX = 64 * 1024 * 1024
COMPILER_THREADS = 1
COMPILE_S_MAX = 20.0
"""A schema that takes longer is refused. Many seconds are for slow machines with busy cores."""

WHITESPACE_MAX = 16
"""Between two tokens of JSON. Without a bound, small models go on with white space for ever."""

logger = logging.getLogger(__name__)


class BoundedGrammarBackend(XGrammarGrammarBackend):  # type: ignore[misc]
    """Compiles one schema after the other, beside the steps, and keeps few."""

    def __init__(self, tokenizer: Any, vocabulary_size: int, stop_token_ids: list[int] | None) -> None:
        super().__init__(
            tokenizer,
            vocab_size=vocabulary_size,
            model_eos_token_ids=stop_token_ids,
            any_whitespace=True,
            max_whitespace_cnt=WHITESPACE_MAX,
        )
        self.executor = ThreadPoolExecutor(COMPILER_THREADS, thread_name_prefix="grammar")
        self.threads = CompilerThreads(self.executor, COMPILE_S_MAX, time.monotonic)
        self.grammar_compiler = JsonCompiler(
            tokenizer_info=self._tokenizer_info,
            max_threads=COMPILER_THREADS,
            # Requests that come together with one new schema each ask for it; it is compiled once.
            cache_limit_bytes=COMPILED_BYTES_MAX,
        )

    def get_cached_or_future_value(self, key: tuple[str, str], require_reasoning: bool) -> Any:
        """See SGLang's."""
        if key in self.cache:
            self.cache[key] = self.cache.pop(key)
        return super().get_cached_or_future_value(key, require_reasoning)

    def _init_value_dispatch(self, key: tuple[str, str], require_reasoning: bool) -> Any:
        with self.threads.compiling(key):
            return super()._init_value_dispatch(key, require_reasoning)

    def set_cache(self, key: tuple[str, str], value: BaseGrammarObject) -> None:
        """See SGLang's."""
        self.cache.pop(key, None)
        self.cache[key] = value
        if len(self.cache) > GRAMMARS_MAX:
            del self.cache[next(iter(self.cache))]


def bound_compilations(manager: Any) -> None:
    """Have SGLang's manager refuse the requests whose schema takes too long. It counts its turns for that, which may
    each take a step; what it decides on the first stage, all ranks do."""
    backend, collect = manager.grammar_backend, manager.get_ready_grammar_requests
    if not isinstance(backend, BoundedGrammarBackend):
        return

    def get_ready_grammar_requests() -> Any:
        overdue = backend.threads.overdue()
        for req in manager.grammar_queue:
            if req.grammar_key in overdue:
                req.grammar_wait_ct = manager.SGLANG_GRAMMAR_MAX_POLL_ITERATIONS
        return collect()

    manager.get_ready_grammar_requests = get_ready_grammar_requests


def register_backend() -> None:
    """Put it in the place of SGLang's own of that name."""
    register_grammar_backend(BACKEND, _create)


def _create(server_args: Any, tokenizer: Any, vocabulary_size: int, eos_token_ids: set[int] | None) -> Any:
    try:
        return BoundedGrammarBackend(tokenizer, vocabulary_size, sorted(eos_token_ids) if eos_token_ids else None)
    except TokenizerNotSupportedError as error:
        logger.warning("output can't be constrained: %s", error)
        return None


def replay_output(req: Any) -> None:
    """Bring a resumed request's grammar to where its earlier output ends. Output that the schema forbids ends the
    request with an error."""
    if req.grammar is None:
        return
    try:
        for token in req.output_ids:
            req.grammar.accept_token(token)
    except ValueError as error:
        message = f"the earlier output doesn't obey the schema: {error}"
        req.to_finish = FINISH_ABORT(message, HTTPStatus.BAD_REQUEST, "BadRequestError")
