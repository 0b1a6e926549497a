"""What the simulator uses of kv_memory must not load torch."""

import subprocess
import sys

MODULES = (
    "data_thread dirty_map endpoint hashing layout live_copy matrix rectangle staged staging transfer "
    "transport transport.base transport.memory transport.tcp"
)


def test_no_torch() -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {MODULES.split()!r}:\n"
        "    importlib.import_module('meshift.kv_memory.' + name)\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "False"
