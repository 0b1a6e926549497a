"""Settings from flags and environment: any pydantic model becomes a command line."""

import inspect
from collections.abc import Sequence
from typing import TypeVar, cast

from pydantic import BaseModel, ValidationError
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict

from meshift.services.cli.errors import EXIT_USAGE, CommandError

ENVIRONMENT_PREFIX = "MESHIFT_"

ModelT = TypeVar("ModelT", bound=BaseModel)


def parse_settings(model: type[ModelT], prog: str, arguments: Sequence[str]) -> ModelT:
    """An instance of `model`: each field from its flag, else from its environment variable, else its default.

    Exits with the help text or a usage message as argparse does. Raises `CommandError` for a value that the model
    refuses.
    """
    settings = settings_class(model, prog)
    try:
        return cast(ModelT, CliApp.run(settings, cli_args=list(arguments)))
    except ValidationError as error:
        raise CommandError("; ".join(map(explain, error.errors())), EXIT_USAGE) from error


def settings_class(model: type[BaseModel], prog: str) -> type[BaseSettings]:
    """`model` as pydantic settings: field `page_size` is `--page-size` and `MESHIFT_PAGE_SIZE`."""
    config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX,
        env_nested_delimiter="__",
        cli_prog_name=prog,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        # Else the fields' own aliases and `protected_namespaces` would decide which names may be used.
        populate_by_name=True,
        protected_namespaces=(),
    )
    names = {"model_config": config, "__doc__": inspect.cleandoc(model.__doc__ or "")}
    return type(model.__name__, (model, BaseSettings), names)


def explain(error: object) -> str:
    """One line about a value that was refused."""
    details = cast("dict[str, object]", error)
    location = cast("tuple[str | int, ...]", details["loc"])
    name = ".".join(map(str, location))
    variable = ENVIRONMENT_PREFIX + "__".join(map(str, location)).upper()
    return f"--{name.replace('_', '-')} ({variable}): {details['msg']}"
