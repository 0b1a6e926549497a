"""Where the command keeps things: models, logs, the state of a running mesh."""

import os
from pathlib import Path

MODELS_VARIABLE = "MESHIFT_MODELS"
CACHE_VARIABLE = "MESHIFT_CACHE"
CHECKOUT_MARK = Path("src", "meshift", "py.typed")


def checkout_root(start: Path) -> Path | None:
    """The checkout of meshift that `start` lies in, if any."""
    for folder in (start, *start.parents):
        if (folder / CHECKOUT_MARK).exists():
            return folder
    return None


def models_folder(working: Path | None = None) -> Path:
    """Where prepared models live: `$MESHIFT_MODELS`; in a checkout its `.models`; else in the user's cache."""
    named = os.environ.get(MODELS_VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    checkout = checkout_root(working or Path.cwd())
    return checkout / ".models" if checkout else cache_folder() / "models"


def cache_folder() -> Path:
    """`$MESHIFT_CACHE`, or a folder in the user's cache."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "meshift").expanduser().absolute()


def state_folder(working: Path | None = None) -> Path:
    """Where a mesh started from here leaves its state and logs: `.meshift`, at the root of a checkout."""
    here = working or Path.cwd()
    return (checkout_root(here) or here) / ".meshift"
