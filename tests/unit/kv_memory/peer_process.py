"""A process that receives: `python -m tests.unit.kv_memory.peer_process tcp|nixl`. It prints its address, and
ends when its input does."""

import json
import sys

from meshift.kv_memory.data_thread import DataThread
from meshift.kv_memory.transport import create_transport

TIMEOUT_S = 20.0


def main(scheme: str) -> None:
    """Apply nothing, but answer."""
    thread = DataThread(lambda: create_transport(scheme, location="127.0.0.1"))
    thread.start(timeout_s=TIMEOUT_S)
    for name in ("one", "two"):
        address = thread.open_transfer(name, lambda patch: None)
        print(json.dumps([address.scheme, address.location, address.rank, address.token]), flush=True)
    sys.stdin.read()
    thread.close(timeout_s=TIMEOUT_S)


if __name__ == "__main__":
    main(sys.argv[1])
