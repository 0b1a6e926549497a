"""Load reports for tests."""

from meshift.schemas.identity import Owner
from meshift.schemas.instances import InstanceState, LoadReport, ModelInfo

MODEL = ModelInfo(name="m", context_tokens_max=8192, vocabulary_size=1000, layers=4)


def load_report(instance: str = "a", incarnation: int = 1, sequence: int = 1, **changes: object) -> LoadReport:
    """An idle instance of 1,000 tokens, with changes."""
    fields: dict[str, object] = {
        "owner": Owner(instance_id=instance, incarnation=incarnation),
        "sequence": sequence,
        "emitted_ns": 0,
        "state": InstanceState.READY,
        "model": MODEL,
        "capacity": 1000,
        "used": 0,
        "cached": 0,
        "free": 1000,
        "reserved": 0,
        "running": 0,
        "waiting": 0,
        "head_demand": 0,
        "queued_demand": 0,
    }
    return LoadReport.model_validate(fields | changes)
