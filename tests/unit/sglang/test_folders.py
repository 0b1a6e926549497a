"""Socket folders go with their owners, however those end."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshift.backends.sglang.folders import LOCK_NAME, PrivateFolder, sweep

OWNER = """
import sys, time
from meshift.backends.sglang.folders import PrivateFolder
print(PrivateFolder().path, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A system folder of our own."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield tmp_path
    tempfile.tempdir = None


def test_a_folder_is_private_and_removed() -> None:
    folder = PrivateFolder()
    (folder.path / "socket").touch()
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert sweep() == []
    folder.remove()
    folder.remove()
    assert not folder.path.exists()


def test_the_folder_of_a_killed_process_is_swept() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip())
        (path / "socket").touch()
        assert sweep() == []
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
    finally:
        owner.kill()
        owner.communicate()
    assert sweep() == [path]
    assert not path.exists()


def test_what_is_no_abandoned_folder_of_ours_stays(temporary_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    abandoned = temporary_files / "meshift-old"
    for folder in ("meshift-made-just-now", "meshift-old", "other", "target"):
        (temporary_files / folder).mkdir()
    for folder in ("meshift-old", "other", "target"):
        (temporary_files / folder / LOCK_NAME).touch()
    (temporary_files / "meshift-link").symlink_to(temporary_files / "target")
    (temporary_files / "meshift-file").touch()
    (temporary_files / "meshift-made-just-now" / LOCK_NAME).symlink_to(abandoned / LOCK_NAME)
    with monkeypatch.context() as another_user:
        another_user.setattr(os, "getuid", lambda: -2)
        assert sweep() == []
    assert sweep() == [abandoned]
    assert sorted(path.name for path in temporary_files.iterdir()) == [
        "meshift-file", "meshift-link", "meshift-made-just-now", "other", "target",
    ]  # fmt: skip
