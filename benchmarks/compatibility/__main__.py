"""Asks, prints what came of it, and writes it down."""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshift.benchmarks.compatibility import __doc__ as description
from meshift.benchmarks.compatibility.langchain_checks import LangChain
from meshift.benchmarks.compatibility.litellm_checks import LiteLLM
from meshift.benchmarks.compatibility.openai_checks import OpenAIClient
from meshift.benchmarks.compatibility.questions import CHECKS, NOT_THERE, Target

CLIENTS: tuple[type[OpenAIClient], ...] = (OpenAIClient, LiteLLM, LangChain)
VERSIONS = ("openai", "litellm", "langchain-openai")


def outcome(check: Callable[[], None]) -> dict[str, Any]:
    """Run one check."""
    begin = time.monotonic()
    try:
        check()
        passed, why = True, ""
    except Exception as error:  # whatever a client raises at an answer counts against the answer
        passed, why = False, f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return {"passed": passed, "why": why, "seconds": round(time.monotonic() - begin, 3)}


def run(target: Target, names: list[str]) -> dict[str, dict[str, Any]]:
    """All checks with all clients that are installed."""
    results: dict[str, dict[str, Any]] = {}
    for kind in CLIENTS:
        if names and kind.package not in names:
            continue
        if importlib.util.find_spec(kind.package) is None:
            results[kind.package] = {"missing": True}
            continue
        client = kind(target)
        names_here = [name for name in CHECKS if kind is OpenAIClient or name not in NOT_THERE]
        results[kind.package] = {name: outcome(getattr(client, f"check_{name}")) for name in names_here}
    return results


def about(server: str, model: str) -> dict[str, Any]:
    """What a reader of the results needs to know."""
    found = [name for name in VERSIONS if importlib.util.find_spec(name.replace("-", "_")) is not None]
    return {
        "server": server,
        "model": model,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in found},
        "checks": CHECKS,
    }


def main() -> int:
    """Returns the number of failed checks, at most 1."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--url", required=True, help="base URL, with /v1")
    parser.add_argument("--model", required=True)
    parser.add_argument("--server", default="", help="what answers there, with its version: for the table")
    parser.add_argument("--key", default="none", help="API key")
    parser.add_argument("--client", action="append", default=[], help="only this package (repeatable)")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    results = run(Target(arguments.url, arguments.model, arguments.key), arguments.client)
    for client, checks in results.items():
        for name, result in checks.items():
            said = "missing" if name == "missing" else "ok" if result["passed"] else f"FAILED {result['why']}"
            print(f"{client:18} {name:12} {said}")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({**about(arguments.server, arguments.model), "results": results}, indent=1) + "\n"
        )
    failed = [name for checks in results.values() for name, result in checks.items()
              if name != "missing" and not result["passed"]]  # fmt: skip
    return min(len(failed), 1)


if __name__ == "__main__":
    sys.exit(main())
