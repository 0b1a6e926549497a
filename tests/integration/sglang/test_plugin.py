"""A stock SGLang in the same environment stays stock: our entry points act only when our variables say so."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(200)]

PROBE = """
import json, sys, importlib.metadata as metadata
groups = ("sglang.srt.platforms", "sglang.srt.plugins")
names = [point.name for group in groups for point in metadata.entry_points(group=group)]
from meshift.backends.sglang.plugin import activate
light = not any(name in sys.modules for name in ("torch", "sglang", "zmq"))
import sglang.srt.managers.scheduler as scheduler
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
from sglang.srt.platforms import current_platform
print(json.dumps({
    "names": names,
    "light": light,
    "scheduler": scheduler.Scheduler.__module__,
    "hooks": [
        target for target, hooks in HookRegistry._hooks.items()
        if target in HookRegistry._patched and any(source.dist_name == "meshift" for *_, source in hooks)
    ],
    "platform": type(current_platform).__name__,
}))
"""
STOCK = "sglang.srt.managers.scheduler"
OURS = ("MESHIFT_ENGINE", "MESHIFT_CPU_PLATFORM", "SGLANG_PLATFORM", "SGLANG_PLUGINS")


def probe(**variables: str) -> dict[str, Any]:
    """What an SGLang process becomes under these variables."""
    environment = {name: value for name, value in os.environ.items() if name not in OURS} | variables
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROBE], env=environment, capture_output=True, text=True, timeout=150, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert {"meshift_cpu", "meshift"} <= set(found["names"]), "entry points are missing: install the package"
    return found


def test_without_our_variables_all_is_stock() -> None:
    found = probe()
    assert found["light"], "importing activate must cost nothing"
    assert found["scheduler"] == STOCK
    assert found["hooks"] == []
    assert found["platform"] != "PortableCpuPlatform"


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="our platform yields to CUDA")
def test_the_platform_alone_leaves_the_scheduler_stock() -> None:
    found = probe(MESHIFT_CPU_PLATFORM="1")
    assert found["platform"] == "PortableCpuPlatform"
    assert found["scheduler"] == STOCK
    assert set(found["hooks"]) == {
        "sglang.srt.distributed.bootstrap._bind_threads_if_cpu",
        "sglang.srt.distributed.bootstrap._init_cpu_threads_env",
        "sglang.srt.mem_cache.allocation.get_last_loc",
    }


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="our platform yields to CUDA")
def test_a_rank_is_ours() -> None:
    found = probe(MESHIFT_ENGINE="1", SGLANG_PLATFORM="meshift_cpu")
    assert found["platform"] == "PortableCpuPlatform"
    assert found["scheduler"] == "meshift.backends.sglang.plugin.scheduler"
    assert "sglang.srt.managers.scheduler.Scheduler" in found["hooks"]
