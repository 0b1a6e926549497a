"""Reads a calibration's file: all of it (`file.py`), or what a service needs that knows no engine (`growth.py`)."""

from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, BeforeValidator, ValidationError

FileT = TypeVar("FileT", bound=BaseModel)

CalibrationPath = Annotated[Path | None, BeforeValidator(lambda value: value or None)]
"""A setting. Empty, as a variable of a compose file that isn't set, means none."""


class CalibrationFileError(ValueError):
    """The file is no calibration; the message says what is wrong with it."""


def read_calibration(path: Path, what: type[FileT]) -> FileT:
    """The file, as `what` has it. Raises CalibrationFileError."""
    try:
        return what.model_validate_json(path.read_bytes())
    except OSError as error:
        raise CalibrationFileError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CalibrationFileError(
            f"{path} is no calibration: {f'{where}: ' if where else ''}{first['msg']}"
        ) from error
