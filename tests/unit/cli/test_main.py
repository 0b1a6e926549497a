"""The command line's first word."""

import subprocess
import sys

import pytest

from meshift.services.cli.main import COMMANDS, help_text, main


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)
    assert max(map(len, shown.splitlines())) <= 80


def test_no_word_shows_help_as_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().out == help_text() + "\n"


def test_an_unknown_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["frobnicate"]) == 2
    assert "no command 'frobnicate'" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("meshift 0.")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main([name, "--help"])
    except SystemExit as end:
        status = int(end.code or 0)
    assert status == 0
    assert f"usage: meshift {name}" in capsys.readouterr().out


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from meshift.services.cli.main import main; main(['--help']);"
        "print([name for name in ('torch', 'sglang', 'transformers', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_commands_of_a_client_import_no_torch() -> None:
    modules = {f"meshift.services.cli.{command.module}" for command in COMMANDS.values()}
    script = (
        f"import sys, importlib; [importlib.import_module(name) for name in {sorted(modules)!r}];"
        "print([name for name in ('torch', 'sglang', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
