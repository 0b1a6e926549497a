"""A stand-in for a worker, to be killed: starts an engine, prints its ranks' pids, and generates for ever."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from meshift.backends.base import EngineFailure, EngineRequest, TokenEvent
from meshift.backends.sglang.engine import SglangEngine
from meshift.backends.sglang.settings import SglangSettings
from meshift.schemas.identity import RequestKey
from meshift.schemas.requests import Sampling


class Listener:
    """Reports the first tokens."""

    def on_step(self, events: Sequence[TokenEvent]) -> None:
        print("step", flush=True)

    def on_failure(self, failure: EngineFailure) -> None:
        print("failure", failure.reason, flush=True)


async def main(model: str, log_dir: str) -> None:
    settings = SglangSettings(model_path=Path(model), model_name="m", log_dir=Path(log_dir), capacity_tokens=8000)
    engine = SglangEngine(settings)
    info = await engine.start(Listener())
    print("ranks", *info.rank_pids, flush=True)
    sampling = Sampling(max_new_tokens=7000, ignore_eos=True)
    engine.submit(EngineRequest(RequestKey("r", 1, 0), range(5, 25), (), sampling))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
