"""What Prometheus gets of a worker's KV memory."""

from types import SimpleNamespace
from typing import Any

from meshift.services.worker.metrics import WorkerCollector
from tests.unit.frontend.fake_frontend import memory_reply


def values(memory: Any) -> dict[tuple[str, ...], float]:
    """By name and label values."""
    core: Any = SimpleNamespace(owner=SimpleNamespace(instance_id="w"))
    families = list(WorkerCollector(core)._memory(memory))
    assert len(families) == 9
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def test_units() -> None:
    assert values(memory_reply("w", 1024)) == {
        ("meshift_kv_pages", "w"): 64,
        ("meshift_kv_page_tokens", "w"): 16,
        ("meshift_kv_resident_bytes", "w"): 5 << 20,
        ("meshift_kv_groups", "w"): 8,
        ("meshift_kv_committed_bytes", "w"): 520 * 98304,
        ("meshift_kv_waste_bytes", "w"): 65 * 49152,
        ("meshift_kv_group_layers", "w", "full"): 4,
        ("meshift_kv_group_layers", "w", "last"): 2,
        ("meshift_kv_unit_waste_bytes", "w", "full"): 0,
        ("meshift_kv_unit_waste_bytes", "w", "last"): 49152,
        ("meshift_kv_units", "w", "committed"): 520,
        ("meshift_kv_units", "w", "given_up"): 512,
    }


def test_one_slab_and_not_known_yet() -> None:
    slab = memory_reply("w", 1024).model_copy(update={"units": None, "page_tokens": 1, "pages": 1024})
    assert values(slab) == {
        ("meshift_kv_pages", "w"): 1024,
        ("meshift_kv_page_tokens", "w"): 1,
        ("meshift_kv_resident_bytes", "w"): 5 << 20,
    }
    assert values(None) == {}
