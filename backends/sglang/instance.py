"""The rank processes of one instance as a whole: up, heard, asked, and down."""

import asyncio
import logging
import os
from collections.abc import Callable
from typing import TypeVar

import msgspec

from meshift.backends.base import EngineStartError
from meshift.backends.sglang import wire, wire_layers, wire_moves
from meshift.backends.sglang.arguments import RANKS_OWN_VARIABLES, rank_environment, server_arguments
from meshift.backends.sglang.fork_server import RANK_MODULE, Forks, ForkServer
from meshift.backends.sglang.link import RankLink
from meshift.backends.sglang.processes import KILL_WAIT_S, RankProcess, end_ranks, free_loopback_port
from meshift.backends.sglang.questions import Questions
from meshift.backends.sglang.rank_spec import RankSpec
from meshift.backends.sglang.settings import SglangSettings

A = TypeVar("A")

logger = logging.getLogger(__name__)


class RankInstance:
    """Owns link and processes. `on_report` gets steps and load; `on_failure` is called at most once, with the reason,
    when a rank has ended by itself or can't be understood."""

    def __init__(
        self,
        settings: SglangSettings,
        on_report: Callable[[wire.Report], None],
        on_failure: Callable[[str], None],
        module: str = RANK_MODULE,
    ) -> None:
        self._module = module
        self._settings = settings
        self._on_report = on_report
        self._on_failure = on_failure
        self._link: RankLink | None = None
        self._forks: Forks | None = None
        self._ranks: list[RankProcess] = []
        self._ready: dict[int, wire.RankReady] = {}
        self._all_ready: asyncio.Future[None] | None = None
        self.questions = Questions(settings.rank_count)
        self._quiet = False
        """Set when no more failure is to be told: there was one, or we end the ranks ourselves."""

    @property
    def pids(self) -> tuple[int, ...]:
        """In rank order."""
        return tuple(rank.pid for rank in self._ranks)

    @property
    def is_up(self) -> bool:
        """Whether commands can be sent."""
        return self._link is not None and not self._quiet

    async def start(self) -> list[wire.RankReady]:
        """Start all ranks and wait until each is ready; in rank order. Raises EngineStartError; ends what it started
        then."""
        self._all_ready = asyncio.get_running_loop().create_future()
        self._link = RankLink()
        self._link.start(self._receive, self._fail)
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                await self._spawn(self._link)
                await self._all_ready
                await self._link.connected()
        except TimeoutError:
            message = f"the ranks aren't ready after {self._settings.start_timeout_s:g} s\n{self._tails()}"
            raise EngineStartError(message) from None
        except EngineStartError:
            # Why it was given up says more than what came of that.
            if self._all_ready.done() and (reason := self._all_ready.exception()):
                raise reason from None
            raise
        return [self._ready[rank] for rank in range(self._settings.rank_count)]

    async def _spawn(self, link: RankLink) -> None:
        settings = self._settings
        try:
            arguments, environment = server_arguments(settings), rank_environment(settings, os.environ)
        except ValueError as error:
            raise EngineStartError(str(error)) from error
        logs = settings.log_dir / settings.instance_name
        server = ForkServer.open(
            self._module, environment, RANKS_OWN_VARIABLES, logs.with_name(f"{logs.name}-imports.log")
        )
        self._forks = forks = Forks(server, self._rank_exited)
        logger.info("%s: importing sglang", settings.instance_name)
        port = free_loopback_port()
        for rank in range(settings.rank_count):
            stage, tensor_rank = divmod(rank, settings.tensor_ranks)
            spec = RankSpec(
                rank=rank,
                tensor_rank=tensor_rank,
                stage=stage,
                worker_pid=os.getpid(),
                server_arguments=arguments,
                commands_address=link.commands_address,
                reports_address=link.reports_address,
                data_host=settings.data_host,
                data_transport=settings.data_transport,
                data_bytes_per_s=settings.data_bytes_per_s,
                rendezvous_port=port,
            )
            spec_path = link.folder / f"rank{rank}.json"
            spec_path.write_bytes(msgspec.json.encode(spec))
            self._ranks.append(
                await forks.start(rank, spec_path, environment, logs.with_name(f"{logs.name}-rank{rank}.log"))
            )

    def _tails(self) -> str:
        return "\n".join(f"last of {rank.log_path}:\n{rank.log_tail()}" for rank in self._ranks)

    def _rank_exited(self, rank: RankProcess) -> None:
        if not self._quiet:
            self._fail(rank.describe_exit())

    def _fail(self, reason: str) -> None:
        if self._quiet:
            return
        if not self._abandon(reason):
            self._on_failure(reason)

    def _abandon(self, reason: str) -> bool:
        """Let nobody wait any longer; whether somebody waited for the start."""
        self._quiet = True
        self.questions.abandon(reason)
        if self._all_ready is None or self._all_ready.done():
            return False
        self._all_ready.set_exception(EngineStartError(reason))
        return True

    def _receive(self, report: wire.Report) -> None:
        match report:
            case wire.RankPhase():
                logger.info("%s: rank %d: %s", self._settings.instance_name, report.rank, report.phase)
            case wire.RankReady():
                self._note_ready(report)
            case wire.LoadSnapshot() | wire.StepReport() | wire_moves.Applied() | wire_layers.LayersExpired():
                if not self._quiet:
                    self._on_report(report)
            case _:
                self.questions.note(report)

    def _note_ready(self, report: wire.RankReady) -> None:
        self._ready[report.rank] = report
        complete = len(self._ready) == self._settings.rank_count
        if complete and self._all_ready is not None and not self._all_ready.done():
            self._all_ready.set_result(None)

    def send(self, command: wire.Command) -> None:
        """Put a command into the stream. Raises Overloaded."""
        assert self._link is not None
        self._link.send(command)

    async def ask_integrity(self, timeout_s: float) -> list[wire.IntegrityReport]:
        """Every rank's report of one iteration, in rank order. Raises TimeoutError or ConnectionError."""
        return await self._ask(lambda nonce: wire.CheckIntegrity(nonce=nonce), wire.IntegrityReport, timeout_s)

    async def resize(self, capacity: int, preempt: bool, timeout_s: float) -> list[wire.KvResized]:
        """Every rank's answer, in rank order. Raises TimeoutError or ConnectionError."""

        def command(nonce: int) -> wire.ResizeKv:
            return wire.ResizeKv(nonce=nonce, capacity=capacity, preempt=preempt)

        return await self._ask(command, wire.KvResized, timeout_s)

    async def ask_memory(self, timeout_s: float) -> list[wire.KvMemory]:
        """Every rank's answer, in rank order. Raises TimeoutError or ConnectionError."""
        return await self._ask(lambda nonce: wire.AskMemory(nonce=nonce), wire.KvMemory, timeout_s)

    async def _ask(self, command: Callable[[int], wire.Command], kind: type[A], timeout_s: float) -> list[A]:
        """The answers of that kind to the command with a question's nonce."""
        if not self.is_up:
            # It would be put to nobody, and nobody would give it up.
            raise ConnectionError("the ranks are lost")
        with self.questions.ask() as question:
            self.send(command(question.nonce))
            answers = await question.answers(timeout_s)
        return [answer for answer in answers if isinstance(answer, kind)]

    async def stop(self, deadline_s: float) -> None:
        """End all ranks and remove the sockets. Idempotent; nothing is called after it."""
        self._abandon("the engine was stopped")
        link, self._link = self._link, None
        if link is None:
            return
        try:
            await end_ranks(self._ranks, deadline_s)
        finally:
            if self._forks is not None:
                await self._forks.close(KILL_WAIT_S)
            await link.close()
