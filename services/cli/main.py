"""The `meshift` command: finds the subcommand and runs it. Subcommands are imported when asked for."""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from meshift.services.cli.errors import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_USAGE, CommandError


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: `main(arguments, prog)` of a module of this package."""

    module: str
    summary: str


COMMANDS: dict[str, Command] = {
    "up": Command("up", "start a whole mesh on this machine; Ctrl-C ends it"),
    "status": Command("status", "show the instances and their load"),
    "chat": Command("chat", "talk to a model; with a message, ask once"),
    "instances": Command("instances", "show the instances, their moves and drains"),
    "requests": Command("requests", "show the open requests of all frontends"),
    "move": Command("move", "move an open request to another instance"),
    "moves": Command("moves", "show moves under way and those that ended"),
    "drain": Command("drain", "move an instance's requests away and let it leave"),
    "restart-workers": Command("restart_workers", "drain and restart the workers, one by one"),
    "memory": Command("memory", "show an instance's KV memory, or change its size"),
    "reconfigure": Command("reconfigure", "give an instance's stages other layers while it serves"),
    "policy": Command("policy", "show the scheduler's policy, or change it while it runs"),
    "decisions": Command("decisions", "show what the scheduler decided lately, and why"),
    "explain": Command("explain", "why a request went where it went"),
    "health": Command("health", "whether a service here lives; for health checks of containers"),
    "model": Command("model", "prepare the small chat model, list local models"),
    "calibrate": Command("calibrate", "measure an instance, for headroom and simulation"),
    "simulate": Command("simulate", "what a policy would make of a workload, in virtual time"),
    "bench": Command("bench", "run a benchmark"),
    "worker": Command("service", "run one instance (started by `up`)"),
    "scheduler": Command("service", "run a scheduler (started by `up`)"),
    "coordinator": Command("service", "run a coordinator (started by `up`)"),
    "frontend": Command("service", "run a frontend with its REST API (started by `up`)"),
    "launcher": Command("service", "start and drain workers of a compose project by load"),
}


def help_text() -> str:
    """What `meshift --help` prints."""
    width = max(map(len, COMMANDS))
    rows = (f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())
    return "\n".join(
        (
            "usage: meshift COMMAND [options]",
            "",
            "An LLM serving mesh on SGLang in which work moves while it runs.",
            "",
            *rows,
            "",
            "`meshift COMMAND --help` shows the options. Each is an environment variable too:",
            "--log-dir is MESHIFT_LOG_DIR. A flag wins.",
        )
    )


def package_version() -> str:
    """The installed version; empty when run without having been installed."""
    try:
        return version("meshift")
    except PackageNotFoundError:
        return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0 if words else EXIT_USAGE
    if words[0] == "--version":
        print(f"meshift {package_version()}")
        return 0
    command = COMMANDS.get(words[0])
    if command is None:
        print(f"meshift: no command {words[0]!r}\n\n{help_text()}", file=sys.stderr)
        return EXIT_USAGE
    return run_command(command, words[0], words[1:])


def run_command(command: Command, name: str, arguments: list[str]) -> int:
    """Run a subcommand; what the user can mend is told in one line."""
    module = importlib.import_module(f"meshift.services.cli.{command.module}")
    try:
        return int(module.main(name, arguments))
    except CommandError as error:
        print(f"meshift {name}: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left; the interpreter's own flush at exit must not complain about it.
        sys.stdout = None
        return EXIT_ERROR
