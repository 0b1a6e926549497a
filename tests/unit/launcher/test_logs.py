"""Log files of launched services."""

from pathlib import Path

from meshift.services.launcher.logs import LogWatch, append_line, start_log, tail


def test_a_new_run_keeps_the_log_of_the_last(tmp_path: Path) -> None:
    log = tmp_path / "deep" / "worker-1.log"
    start_log(log)
    append_line(log, "first")
    start_log(log)
    append_line(log, "second")
    start_log(log)
    assert log.read_text() == ""
    assert log.with_name("worker-1.log.1").read_text() == "---- second ----\n"


def test_tail(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log) == ""
    log.write_bytes(b"".join(b"line %d \xff\n" % number for number in range(30_000)))
    assert tail(log, 2) == "line 29998 \ufffd\nline 29999 \ufffd"


def test_watch_sees_a_line_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("an older run is ready\n")
    watch = LogWatch(log, " is ready")
    assert not watch.found()
    with log.open("a") as writer:
        writer.write("noise\nworker is re")
        writer.flush()
        assert not watch.found()
        writer.write("ady")
        writer.flush()
        assert not watch.found()
        writer.write("\nmore\n")
        writer.flush()
    assert watch.found()
    assert not watch.found()
