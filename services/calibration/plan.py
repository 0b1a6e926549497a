"""What is measured, in which order. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
"""Requests of typical length at once; each doubles the load."""

LONG_FACTORS = (1 / 8, 4, 16)
"""Contexts beside the typical one, which tell what a token costs from what a request does."""

LONG_WIDTHS = (1, 4)
PROMPTS = (16, 64, 256, 512, 1024, 2048, 4096)
QUICK_PROMPTS = (16, 256, 1024, 2048)

PASSES, QUICK_PASSES = 3, 1
STEPS, QUICK_STEPS = 24, 12
FILL = 0.9
"""Share of the KV capacity that is used at most: nothing is to be preempted."""

SETTLE_STEPS = 2
"""Steps that don't count after the last prompt's prefill."""


class PlanError(ValueError):
    """The instance is too small to be measured so."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement."""

    kind: Literal["decode", "prefill"]
    requests: int
    prompt_tokens: int
    steps: int
    """Decode steps that count."""

    @property
    def name(self) -> str:
        """The same for the same measurement."""
        return f"{self.kind}-{self.requests}x{self.prompt_tokens}"


@dataclass(frozen=True, slots=True)
class Room:
    """What the instance can hold, in tokens."""

    capacity: int
    context_max: int

    def takes(self, requests: int, tokens: int) -> bool:
        """Whether so many requests of that final length fit."""
        return tokens <= self.context_max and requests * tokens <= FILL * self.capacity


def output_tokens(cell: Cell) -> int:
    """Of each of its requests. Whoever is prefilled first decodes while the others are: each prompt may take its own
    step, in which the first ones give a token."""
    if cell.kind == "prefill":
        return 1
    return 1 + cell.requests + SETTLE_STEPS + cell.steps


def plan(room: Room, request_tokens: int, requests_max: int, quick: bool) -> list[Cell]:
    """One pass. Raises PlanError if not even a few batches fit."""
    steps = QUICK_STEPS if quick else STEPS
    decodes = [Cell("decode", width, request_tokens, steps) for width in WIDTHS if width <= requests_max]
    for factor in LONG_FACTORS:
        length = max(8, int(request_tokens * factor))
        decodes += [Cell("decode", width, length, steps) for width in LONG_WIDTHS if width <= requests_max]
    prompts = QUICK_PROMPTS if quick else PROMPTS
    prefills = [Cell("prefill", 1, tokens, 0) for tokens in prompts]
    cells = [
        cell for cell in (*decodes, *prefills) if room.takes(cell.requests, cell.prompt_tokens + output_tokens(cell))
    ]
    typical = [cell for cell in cells if cell.kind == "decode" and cell.prompt_tokens == request_tokens]
    if len(typical) < 2 or sum(cell.kind == "prefill" for cell in cells) < 3:
        raise PlanError(
            f"an instance of {room.capacity} tokens (context {room.context_max}) holds too few requests of"
            f" {request_tokens} tokens to be measured; --request-tokens takes shorter ones"
        )
    return cells


def passes(cells: list[Cell], quick: bool) -> Iterator[tuple[int, Cell]]:
    """All measurements: the cells again and again, so that a slow minute of the machine doesn't meet one alone."""
    for number in range(QUICK_PASSES if quick else PASSES):
        for cell in cells:
            yield number, cell
