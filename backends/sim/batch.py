"""Arithmetic of the decode batch, and of equal steps taken at once. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt

from meshift.backends.sim.parameters import SimParameters, StepCost
from meshift.backends.sim.request import SimRequest

NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Segment:
    """`steps` decode steps of one batch, each `growth_ns` longer than the one before."""

    start_ns: int
    first_ns: int
    growth_ns: int
    steps: int

    def duration(self, steps: int) -> int:
        """Time of the first `steps` steps."""
        return steps * self.first_ns + self.growth_ns * (steps * (steps - 1) // 2)

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration(self.steps)

    def completed(self, now_ns: int) -> int:
        """Steps that have ended by `now_ns`, the last one excepted: its end is the segment's, an event of its own."""
        elapsed = now_ns - self.start_ns
        if self.steps == 1 or elapsed < self.first_ns:
            return 0
        # The greatest j with j * first + growth * j * (j - 1) / 2 <= elapsed. Rounding the root down loses nothing:
        # 2 * growth * j + half is whole.
        if self.growth_ns:
            half = 2 * self.first_ns - self.growth_ns
            count = (isqrt(half * half + 8 * self.growth_ns * elapsed) - half) // (2 * self.growth_ns)
        else:
            count = elapsed // self.first_ns
        return min(self.steps - 1, count)

    def last_step(self, completed: int) -> "Segment":
        """Only the step that is on its way after `completed` ones."""
        first_ns = self.first_ns + self.growth_ns * completed
        return Segment(self.start_ns + self.duration(completed), first_ns, self.growth_ns, 1)


class DecodeBatch:
    """The running requests. All advance by one token a step, so a request is described by the step at which it
    entered, and page needs by how many requests fill a page at which step."""

    def __init__(self, parameters: SimParameters) -> None:
        self._page_size = parameters.page_size
        self._requests: dict[SimRequest, None] = {}
        self._phases = [0] * parameters.page_size
        """Requests by the step, modulo the page size, at which they need a new page."""
        self.steps = 0
        """Steps taken, ever."""
        self.decoded = 0
        """Tokens that all steps have computed, ever."""
        self.tokens = 0
        """With KV, of all requests."""
        self.next_finish = NEVER
        """The step after which the next request is finished."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[SimRequest]:
        return iter(self._requests)

    def add(self, request: SimRequest) -> None:
        """Let it in at this boundary."""
        request.entry_step = self.steps
        request.finish_step = self.steps + request.generation.limit - request.generated
        self._requests[request] = None
        self._phases[(self.steps - request.computed) % self._page_size] += 1
        self.tokens += request.computed
        self.next_finish = min(self.next_finish, request.finish_step)

    def remove(self, request: SimRequest) -> None:
        """Take it out at this boundary; its counts are then the present ones."""
        del self._requests[request]
        self._phases[(request.entry_step - request.computed) % self._page_size] -= 1
        passed = self.steps - request.entry_step
        request.computed += passed
        request.generated += passed
        self.tokens -= request.computed
        if request.finish_step == self.next_finish:
            self.next_finish = min((other.finish_step for other in self._requests), default=NEVER)

    def computed(self, request: SimRequest, ahead: int = 0) -> int:
        """Its tokens with KV, `ahead` steps from the last boundary."""
        return request.computed + self.steps - request.entry_step + ahead

    def generated(self, request: SimRequest, ahead: int = 0) -> int:
        """Its output tokens, `ahead` steps from the last boundary."""
        return request.generated + self.steps - request.entry_step + ahead

    def advance(self, steps: int) -> None:
        """That many steps have ended."""
        self.steps += steps
        self.decoded += steps * len(self._requests)
        self.tokens += steps * len(self._requests)

    def finished(self) -> list[SimRequest]:
        """Those whose last token this step gave, in the order in which they entered."""
        if self.steps < self.next_finish:
            return []
        return [request for request in self._requests if request.finish_step == self.steps]

    def newest(self) -> SimRequest:
        """The one admitted last."""
        return max(self._requests, key=lambda request: (request.admitted_ns, request.arrived_ns, request.sequence))

    def pages_needed(self, skipped: int, steps: int) -> int:
        """Pages that `steps` steps take, after `skipped` ones from the last boundary."""
        cycles, rest = divmod(steps, self._page_size)
        pages = cycles * len(self._requests)
        if rest:
            start = (self.steps + skipped) % self._page_size
            end = start + rest
            pages += sum(self._phases[start:end])
            if end > self._page_size:
                pages += sum(self._phases[: end - self._page_size])
        return pages

    def steps_possible(self, free: int) -> int:
        """Steps until the next finish, or fewer if the free pages end before. At least 1: the caller has made room
        for one."""
        most = self.next_finish - self.steps
        if self.pages_needed(0, most) <= free:
            return most
        least = 1
        while most - least > 1:
            middle = (least + most) // 2
            if self.pages_needed(0, middle) <= free:
                least = middle
            else:
                most = middle
        return least

    def segment(self, now_ns: int, cost: StepCost, steps: int) -> Segment:
        """The next `steps` steps."""
        count = len(self._requests)
        first_ns = cost.step_ns(count, self.tokens)
        return Segment(now_ns, first_ns, cost.token * count, steps)

    def check(self) -> None:
        """Raise AssertionError if the counters aren't those of the requests."""
        phases = [0] * self._page_size
        for request in self._requests:
            phases[(request.entry_step - request.computed) % self._page_size] += 1
        assert phases == self._phases, f"phases {self._phases} are really {phases}"
        tokens = sum(self.computed(request) for request in self._requests)
        assert tokens == self.tokens, f"{self.tokens} tokens in the batch are really {tokens}"
