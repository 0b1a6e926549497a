"""A rank compiles a schema before its request comes, and keeps it when all ranks have it."""

from concurrent.futures import Future
from typing import Any

import pytest

from meshift.backends.sglang import wire_moves as wire
from meshift.backends.sglang.plugin.schemas import ASIDE_MAX, Schemas

COMPILE_S_MAX = 20.0


class Backend:
    """SGLang's, as far as it is used."""

    def __init__(self) -> None:
        self.cache: dict[tuple[str, str], Any] = {}
        self.futures: dict[str, Future[Any]] = {}

    def get_cached_or_future_value(self, key: tuple[str, str], require_reasoning: bool) -> tuple[Any, bool]:
        if key in self.cache:
            return self.cache[key], True
        assert key[1] not in self.futures, "compiled twice"
        return self.futures.setdefault(key[1], Future()), False

    def set_cache(self, key: tuple[str, str], value: Any) -> None:
        self.cache[key] = value


class Rank:
    def __init__(self, backend: Backend | None = None) -> None:
        self.backend, self.answers, self.now_s = backend or Backend(), list[int](), 0.0
        self.schemas = Schemas(lambda: self.backend, self.answers.append, COMPILE_S_MAX, lambda: self.now_s)

    def learn(self, nonce: int, schema: str = "s") -> None:
        self.schemas.learn(wire.LearnSchema(nonce=nonce, json_schema=schema))

    def keep(self, schema: str = "s") -> None:
        self.schemas.keep(wire.KeepSchema(json_schema=schema))


def test_it_is_known_when_all_ranks_have_it() -> None:
    rank = Rank()
    rank.learn(1)
    rank.learn(2)
    rank.schemas.look()
    assert (rank.answers, rank.schemas.has_work) == ([], True)
    rank.backend.futures["s"].set_result("grammar")
    rank.schemas.look()
    rank.schemas.look()
    assert (rank.answers, rank.schemas.has_work) == ([1, 2], False)
    assert rank.backend.cache == {}, "another rank may not have it yet"
    rank.keep()
    rank.keep()
    assert rank.backend.cache == {("json", "s"): "grammar"}
    rank.learn(3)
    assert rank.answers == [1, 2, 3]


@pytest.mark.slow
def test_one_that_cannot_be_compiled_is_known_as_that() -> None:
    rank = Rank()
    rank.learn(1)
    rank.backend.futures["s"].set_exception(RuntimeError("no such type"))
    rank.schemas.look()
    rank.keep()
    assert rank.answers == [1]
    assert "no such type" in rank.backend.cache["json", "s"].error_message


def test_nobody_waits_for_ever() -> None:
    rank = Rank()
    rank.learn(1)
    rank.now_s = COMPILE_S_MAX
    assert not rank.schemas.has_work
    for number in range(ASIDE_MAX):
        rank.learn(number + 2, f"other {number}")
    rank.keep()
    assert rank.backend.cache == {}, "the oldest is forgotten"


def test_an_engine_that_obeys_no_schemas() -> None:
    rank = Rank()
    rank.backend = None  # type: ignore[assignment]
    rank.learn(1)
    rank.keep()
    assert rank.answers == [1]
