"""The log file of a launched service."""

from pathlib import Path

TAIL_LINES = 20
TAIL_BYTES_MAX = 64 * 1024


def start_log(path: Path) -> None:
    """An empty log file; the one of the run before is kept beside it as `.1`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        path.replace(path.with_name(path.name + ".1"))
    path.touch()


def append_line(path: Path, text: str) -> None:
    """A line of ours among the service's."""
    with path.open("a") as log:
        log.write(f"---- {text} ----\n")


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log; empty if there is none."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, 2) - TAIL_BYTES_MAX))
            text = log.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


class LogWatch:
    """Looks for a line in what a log gets from now on."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._text = text.encode()
        self._offset = path.stat().st_size if path.exists() else 0

    def found(self) -> bool:
        """Whether a whole line with the text has come since the last call (or the start)."""
        with self._path.open("rb") as log:
            log.seek(self._offset)
            news = log.read()
        whole = news.rpartition(b"\n")[0]
        self._offset += len(whole) + 1 if whole else 0
        return self._text in whole
