"""What linters don't know of this project: `make check` runs it.

1. Services take time from the running loop and randomness from an injected generator, start no threads, and use
   nothing that runs tasks in no fixed order. Otherwise a simulation from a seed would not repeat.
   What never runs in simulation, and the virtual clock itself, are exempt.
2. No source file is longer than `FILE_LINES_MAX`; test suites may be.
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES_MAX = 400

SOURCE_FOLDERS = (
    "backends",
    "benchmarks",
    "kernels",
    "kv_memory",
    "schemas",
    "scripts",
    "services",
    "tests",
    "tracing",
)
EXEMPT_FOLDERS = ("services/frontend/http", "services/cli", "services/launcher")
EXEMPT_FILES = ("services/process.py", "services/simulation/virtual_time.py")
EXEMPT_NAMES = ("main.py",)

LOOP_TIME = "take the time from the running loop"
INJECT = "take an injected random.Random"
NO_THREADS = "services start no threads"
NO_ORDER = "has no fixed order"

FORBIDDEN_MODULES = {"time": LOOP_TIME, "secrets": INJECT, "concurrent": NO_THREADS}
FORBIDDEN_NAMES = {
    "asyncio.to_thread": NO_THREADS,
    "asyncio.TaskGroup": NO_ORDER,
    "asyncio.wait": f"its result {NO_ORDER}",
    "asyncio.all_tasks": NO_ORDER,
    "datetime.datetime.now": LOOP_TIME,
    "datetime.datetime.utcnow": LOOP_TIME,
    "datetime.datetime.today": LOOP_TIME,
    "datetime.date.today": LOOP_TIME,
    "os.urandom": INJECT,
    "threading.Thread": NO_THREADS,
    "threading.Timer": NO_THREADS,
    "uuid.uuid1": INJECT,
    "uuid.uuid4": INJECT,
}
FORBIDDEN_METHODS = {"run_in_executor": NO_THREADS, "all_tasks": NO_ORDER}
RANDOM_ALLOWED = ("random.Random",)


@dataclass(frozen=True, order=True)
class Finding:
    """One offence."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def lint_services(source: str, path: str) -> list[Finding]:
    """Offences against determinism in one service module."""
    tree = ast.parse(source, path)
    origins: dict[str, str] = {}
    findings: set[Finding] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for local, origin in imported_names(node):
                origins[local] = origin
                findings |= {Finding(path, node.lineno, text) for text in offences_of_import(origin)}
    harmless = set(waits_without_result(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node not in harmless:
            findings |= {Finding(path, node.lineno, text) for text in offences_of_use(node, origins)}
    return sorted(findings)


def waits_without_result(tree: ast.Module) -> Iterator[ast.expr]:
    """The `asyncio.wait` in statements like `await asyncio.wait(tasks)`: without its sets nothing depends on order."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Await(value=ast.Call(func=ast.Attribute(attr="wait") as function))):
                yield function


def imported_names(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """(name in this module, what it stands for) of an import."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, f"{node.module or '.'}.{alias.name}"
        elif alias.asname:
            yield alias.asname, alias.name
        else:
            top = alias.name.split(".")[0]
            yield top, top


def offences_of_import(origin: str) -> Iterator[str]:
    """What is wrong with importing `origin`."""
    top = origin.split(".", maxsplit=1)[0]
    if top in FORBIDDEN_MODULES:
        yield f"import of {origin}: {FORBIDDEN_MODULES[top]}"
    elif origin in FORBIDDEN_NAMES:
        yield f"import of {origin}: {FORBIDDEN_NAMES[origin]}"
    elif is_random_function(origin):
        yield f"import of {origin}: {INJECT}"


def offences_of_use(node: ast.Attribute, origins: dict[str, str]) -> Iterator[str]:
    """What is wrong with an attribute like `asyncio.wait` or `loop.run_in_executor`."""
    name = dotted_name(node, origins)
    if name in FORBIDDEN_NAMES:
        yield f"{name}: {FORBIDDEN_NAMES[name]}"
    elif is_random_function(name):
        yield f"{name}: {INJECT}"
    elif node.attr in FORBIDDEN_METHODS:
        yield f"{node.attr}: {FORBIDDEN_METHODS[node.attr]}"


def dotted_name(node: ast.expr, origins: dict[str, str]) -> str:
    """`a.b.c` with `a` replaced by what it was imported from; empty if it doesn't start at an import."""
    if isinstance(node, ast.Name):
        return origins.get(node.id, "")
    if isinstance(node, ast.Attribute):
        start = dotted_name(node.value, origins)
        return f"{start}.{node.attr}" if start else ""
    return ""


def is_random_function(name: str) -> bool:
    """Whether `name` is a function of the shared generator of module `random`."""
    return name.startswith("random.") and not name.startswith(RANDOM_ALLOWED)


def lint_length(source: str, path: str) -> list[Finding]:
    """The offence of being too long."""
    lines = source.count("\n")
    if lines <= FILE_LINES_MAX:
        return []
    return [Finding(path, FILE_LINES_MAX + 1, f"{lines} lines, more than {FILE_LINES_MAX}: split it")]


def is_exempt(path: str) -> bool:
    """Whether a module is an edge that never runs in simulation."""
    inside = any(path.startswith(f"{folder}/") for folder in EXEMPT_FOLDERS)
    return inside or path in EXEMPT_FILES or path.rsplit("/", 1)[-1] in EXEMPT_NAMES


def source_files(root: Path) -> Iterable[Path]:
    """All Python files of the project, in a fixed order."""
    for folder in SOURCE_FOLDERS:
        yield from sorted((root / folder).rglob("*.py"))


def main() -> int:
    findings: list[Finding] = []
    count = 0
    for file in source_files(ROOT):
        count += 1
        path, source = file.relative_to(ROOT).as_posix(), file.read_text()
        if not path.startswith("tests/"):
            findings += lint_length(source, path)
        if path.startswith("services/") and not is_exempt(path):
            findings += lint_services(source, path)
    print("\n".join(map(str, findings)) or f"lint_services: {count} files, no findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
