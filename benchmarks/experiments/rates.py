"""The request rates of the serving matrix: those at which INFaaS++ has a P99 prefill of 5, 10 and 30 s in the median of
some seeds. `scripts/find_rates.py` finds them; they are frozen in `rates.json`, with those seeds and the hash of the
engine's numbers."""

import json
from pathlib import Path

from meshift.backends.sim.parameters import SimParameters

FILE = Path(__file__).with_name("rates.json")
TARGETS_S = (5, 10, 30)


def known_rates(parameters: SimParameters) -> dict[str, dict[int, float]]:
    """By trace and target. Raises ValueError if they were found for another engine."""
    told = json.loads(FILE.read_text())
    if told["parameters_hash"] != parameters.parameters_hash():
        raise ValueError(f"{FILE.name} was found for engine {told['parameters_hash']}: find the rates anew")
    return {trace: {int(target): rate for target, rate in rates.items()} for trace, rates in told["rates"].items()}


def rate_of(rates: dict[str, dict[int, float]], trace: str, target_s: int) -> float:
    """Raises ValueError if it isn't known."""
    try:
        return rates[trace][target_s]
    except KeyError:
        raise ValueError(f"{FILE.name} has no rate of {trace} for {target_s} s: run scripts/find_rates.py") from None
