"""Tables, numbers with units, and views that are shown again and again."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Collection, Sequence

from pydantic import BaseModel, Field

CLEAR = "\x1b[2J\x1b[H"
"""Wipes a terminal."""

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class ViewSettings(BaseModel):
    """How something is shown."""

    as_json: bool = Field(False, alias="json", description="as JSON, one document")
    watch: bool = Field(False, description="show it again every second, until Ctrl-C")
    interval_s: float = Field(1.0, gt=0, description="how often, with --watch")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> str:
    """Aligned columns, those in `right` to the right."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = []
    for row in (columns, *rows):
        cells = (
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(columns, row, widths, strict=True)
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def seconds(nanoseconds: int) -> str:
    """A time for people; `-` for none."""
    if not nanoseconds:
        return "-"
    return f"{nanoseconds / 1e6:.1f} ms" if nanoseconds < 1e9 else f"{nanoseconds / 1e9:.2f} s"


def amount(byte_count: int) -> str:
    """A size for people; `-` for none."""
    if not byte_count:
        return "-"
    size, unit = float(byte_count), 0
    while size >= 1024 and unit < len(_BYTE_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} B" if unit == 0 else f"{size:.1f} {_BYTE_UNITS[unit]}"


async def show(look: Callable[[], Awaitable[str]], settings: ViewSettings) -> None:
    """Print what `look` gives, once or again and again. On a terminal each takes the place of the one before."""
    while True:
        text = await look()
        print((CLEAR if settings.watch and sys.stdout.isatty() else "") + text, flush=True)
        if not settings.watch:
            return
        await asyncio.sleep(settings.interval_s)
