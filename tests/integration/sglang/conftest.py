"""Real engines, started once and shared. All run on the session's one event loop.

One instance of one rank lives for the whole session (`base`), and each module may have one more of two ranks.
"""

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from meshift.backends.sglang.arguments import RANKS_OWN_VARIABLES, rank_environment
from meshift.backends.sglang.engine import SglangEngine
from meshift.backends.sglang.fork_server import RANK_MODULE, ForkServer
from meshift.backends.sglang.models import make_random_llama, prepare_smollm2
from meshift.backends.sglang.settings import SglangSettings
from tests.contract.engine_kit import CollectingListener, MovePair, Rig

SEED = 11
STOP_DEADLINE_S = 10.0
REQUEST_TIMEOUT_S = 90.0
END_S_MAX = 2.0
CAPACITY_TOKENS = 1200
"""Small enough that many requests at once queue and preempt each other."""

FILLER_PROMPTS = (450, 450)
WAITER_TOKENS = 400
"""Not enough is left for it beside the fillers."""

LONG_TOKENS = 100
RESERVATION_S = 60.0
SHORT_RESERVATION_S = 0.3
HEADROOM_TOKENS = 60
"""The small model makes some hundred tokens a second."""


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real chat model."""
    models = Path(__file__).parents[3] / ".models"
    return prepare_smollm2(models / "smollm2", print)


@pytest.fixture(scope="session")
def random_llama(smollm2: Path) -> Path:
    """A small model of random weights, with the chat model's tokenizer. Its logits lie so close together that penalties
    decide what it gives."""
    return make_random_llama(smollm2.parent / "random-llama-soft", tokenizer_from=smollm2, head_scale=0.15)


@pytest.fixture(scope="session", autouse=True)
def imported(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What SGLang imports, in one process for all engines of these tests."""
    log_dir = tmp_path_factory.mktemp("imports")
    settings = SglangSettings(model_path=smollm2, model_name="any", log_dir=log_dir, threads_per_rank=1)
    server = ForkServer.open(
        RANK_MODULE, rank_environment(settings, os.environ), RANKS_OWN_VARIABLES, log_dir / "imports.log"
    )
    yield
    server.close()


@contextlib.asynccontextmanager
async def running(model: Path, log_dir: Path, **settings: Any) -> AsyncIterator[Rig]:
    """A started engine in the contract suite's rig, stopped in the end."""
    chosen = {"capacity_tokens": CAPACITY_TOKENS, "threads_per_rank": 1, **settings}
    engine = SglangEngine(
        SglangSettings(model_path=model, model_name=model.name, log_dir=log_dir, **chosen), random.Random(SEED)
    )
    listener = CollectingListener()
    info = await engine.start(listener)
    try:
        print(f"seed {SEED}; ranks {info.rank_pids}, logs in {log_dir}")
        yield Rig(
            engine,
            info,
            listener,
            random.Random(SEED),
            token_range=(3, info.model.vocabulary_size),
            timeout_s=REQUEST_TIMEOUT_S,
        )
    finally:
        await engine.stop(STOP_DEADLINE_S)


@contextlib.asynccontextmanager
async def moving(model: Path, log_dir: Path, **settings: Any) -> AsyncIterator[Rig]:
    """An engine for the suite of moves; it compares at both ends what it moves."""
    # Admits more than fits, so that requests are preempted.
    chosen = {"verify_moves": True, "extra_server_args": {"schedule_conservativeness": 0.1}, **settings}
    async with running(model, log_dir, **chosen) as rig:
        rig.filler_prompts = FILLER_PROMPTS
        rig.waiter_tokens = WAITER_TOKENS
        rig.long_tokens = LONG_TOKENS
        yield rig


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def base_engine(random_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    """One rank, page size 1, prefix cache: what the others are compared with."""
    async with moving(random_llama, tmp_path_factory.mktemp("base"), capacity_tokens=CAPACITY_TOKENS) as rig:
        yield rig


@pytest_asyncio.fixture(loop_scope="session")
async def base(base_engine: Rig) -> AsyncIterator[Rig]:
    """`base_engine`, left idle and whole by each test."""
    yield base_engine
    await base_engine.settle()


def pair_of(source: Rig, destination: Rig) -> MovePair:
    """Two of these engines, between which requests move."""
    return MovePair(source, destination, RESERVATION_S, SHORT_RESERVATION_S, HEADROOM_TOKENS)


@pytest.fixture(scope="session")
def text_of(smollm2: Path) -> Callable[[Sequence[int]], str]:
    """Token ids to text, without special tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    return lambda tokens: str(tokenizer.decode(list(tokens)))


@pytest.fixture(scope="session")
def smollm2_text(smollm2: Path) -> Callable[[Sequence[int]], str]:
    """Token ids to text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    return lambda tokens: str(tokenizer.decode(list(tokens)))


def descendants(pids: Sequence[int]) -> list[int]:
    """The processes and what they have started."""
    found = list(pids)
    for pid in found:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            found += [int(word) for word in children.read_text().split()]
    return found


async def ended(pids: Sequence[int]) -> None:
    """Wait a little until none runs: what a killed rank had started is killed too, but nobody can wait for it."""
    async with asyncio.timeout(END_S_MAX):
        while left_alive(pids):
            await asyncio.sleep(0.01)


def left_alive(pids: Sequence[int]) -> list[int]:
    """Those that still run (a zombie doesn't)."""
    alive = []
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX":
                alive.append(pid)
    return alive
