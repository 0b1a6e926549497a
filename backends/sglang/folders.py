"""Private folders for sockets that don't outlive their process, even where it is killed with -9.

Who makes a folder holds a lock on a file in it, which the kernel lets go of when the process ends, whatever ends it. A
later start by the same user removes folders whose lock nobody holds.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

PREFIX: Final = "meshift-"
LOCK_NAME: Final = "owner.lock"
_DRAFT_NAME: Final = "owner.draft"


class PrivateFolder:
    """A new folder in the system's one for temporary files, readable by its user only."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        # Locked before it has its name: one that is found under it unlocked has lost its owner.
        self._lock = os.open(self.path / _DRAFT_NAME, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(self.path / _DRAFT_NAME, self.path / LOCK_NAME)

    def remove(self) -> None:
        """With all that is in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep() -> list[Path]:
    """Remove this user's folders whose owners are dead; which ones. Others' folders, and what isn't one, stay."""
    gone = []
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):
            if _is_abandoned(path):
                shutil.rmtree(path)
                gone.append(path)
    return gone


def _is_abandoned(path: Path) -> bool:
    """Raises OSError if it can't be told."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(folder).st_uid != os.getuid():
            return False
        lock = os.open(LOCK_NAME, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
