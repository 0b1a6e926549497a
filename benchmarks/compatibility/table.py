"""The table of docs/compatibility.md, out of the files that the checks wrote:

PYTHONPATH=src python -m meshift.benchmarks.compatibility.table --into docs/compatibility.md FILE...

It is put between the two marks in the document. A cell that isn't a yes must be explained there, in an item that begins
with "- `check`, server:"; without it nothing is written.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BEGIN = "<!-- table: made by meshift.benchmarks.compatibility.table -->"
END = "<!-- end of table -->"
Result = dict[str, Any]


def table(results: Sequence[Result]) -> str:
    """Markdown: a row for each check, a column for each server and client."""
    columns = [(result, client) for result in results for client in result["results"]]
    heads = [f"{short(result)}: `{client}`" for result, client in columns]
    lines = [line_of(["check", *heads, "what is asked"]), line_of(["---"] * (len(heads) + 2))]
    for check, meaning in results[0]["checks"].items():
        cells = [cell(result["results"][client], check) for result, client in columns]
        lines.append(line_of([f"`{check}`", *cells, meaning]))
    return "\n".join([*lines, "", *map(provenance, results)])


def line_of(cells: Sequence[str]) -> str:
    """A row."""
    return f"| {' | '.join(cells)} |"


def cell(checks: dict[str, Any], check: str) -> str:
    """Yes, no, or a dash for what a client can't ask or for a client that wasn't there."""
    outcome = checks.get(check)
    return "-" if outcome is None else "yes" if outcome["passed"] else "**no**"


def short(result: Result) -> str:
    """A server's name without its version."""
    return str(result["server"]).partition(" ")[0]


def provenance(result: Result) -> str:
    """A line of versions and of the date."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"- {result['server']}: {result['date']}, model `{result['model']}`; Python {result['python']}, {versions}."


def unexplained(results: Sequence[Result], document: str) -> list[str]:
    """The items that the document lacks."""
    wanted = [
        f"- `{check}`, {short(result)}:"
        for result in results
        for check in result["checks"]
        if any(cell(checks, check) == "**no**" for checks in result["results"].values())
    ]
    return [item for item in wanted if item not in document]


def replaced(document: str, text: str) -> str:
    """The document with another table. Raises ValueError if it has no place for one."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"it lacks the marks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def main() -> int:
    """Returns 1 if a no isn't explained."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="what the checks wrote, the mesh's first")
    parser.add_argument("--into", required=True, type=Path, help="the document")
    arguments = parser.parse_args()
    results: list[Result] = [json.loads(path.read_text()) for path in arguments.files]
    document = arguments.into.read_text()
    missing = unexplained(results, document)
    if missing:
        print("not explained:", *missing, sep="\n", file=sys.stderr)
        return 1
    arguments.into.write_text(replaced(document, table(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
