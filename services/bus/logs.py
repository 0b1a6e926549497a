"""Logging that a storm of bad messages can't turn into a storm of lines."""

import asyncio
import logging
from collections.abc import Hashable

INTERVAL_S = 1.0
"""At most one line a key in this time."""

KEYS_MAX = 1_024
"""Keys remembered at once; over it all are forgotten, which costs at most a line too many each."""


class QuietLog:
    """Logs the first event of a key, then at most one line every `INTERVAL_S` that says how many were left out."""

    def __init__(self, logger: logging.Logger, client_name: str) -> None:
        self._logger = logger
        self._client_name = client_name
        self._last: dict[Hashable, tuple[float, int]] = {}

    def report(self, key: Hashable, message: str, error: BaseException | None = None) -> None:
        """Log `message`, with the traceback of `error` if there is one."""
        now = asyncio.get_running_loop().time()
        last, left_out = self._last.get(key, (now - INTERVAL_S, 0))
        if now - last < INTERVAL_S:
            self._last[key] = (last, left_out + 1)
            return
        if len(self._last) >= KEYS_MAX:
            self._last.clear()
        self._last[key] = (now, 0)
        more = f" ({left_out} like it left out)" if left_out else ""
        self._logger.warning("bus client %s: %s%s", self._client_name, message, more, exc_info=error)
