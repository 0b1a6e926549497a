"""The measurements of a calibration on disk, one a line, so that one that was broken off goes on where it was."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshift.services.calibration.measuring import Sample


class RecordError(ValueError):
    """The file can't be gone on with; the message says why."""


class Record:
    """`FILE.raw.jsonl`: a header that says what is measured, then the samples."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self._path = path
        self._header = dict(header)

    @staticmethod
    def path_of(result: Path) -> Path:
        """Beside the result."""
        return result.with_name(result.name + ".raw.jsonl")

    def begin(self, resume: bool) -> list[Sample]:
        """The samples to go on from: none, in a new file, unless `resume`. Raises RecordError, OSError."""
        if resume and self._path.exists():
            return self._read()
        self._path.write_text(json.dumps(self._header) + "\n")
        return []

    def keep(self, sample: Sample) -> None:
        """Add one. Raises OSError."""
        with self._path.open("a") as file:
            file.write(json.dumps(sample) + "\n")

    def _read(self) -> list[Sample]:
        whole = self._path.read_text()
        # What was being written when it was broken off is no sample.
        lines = whole[: whole.rfind("\n") + 1].splitlines()
        try:
            header, *samples = map(json.loads, lines)
            for sample in samples:
                _ = sample["pass"], sample["cell"], sample["kind"], sample["requests"], sample["prompt_tokens"]
        except (ValueError, KeyError, TypeError) as error:
            raise RecordError(f"{self._path} holds no measurements: {error}") from error
        if header != self._header:
            differ = sorted(name for name in {*header, *self._header} if header.get(name) != self._header.get(name))
            told = ", ".join(f"{name} {header.get(name)} there, {self._header.get(name)} here" for name in differ)
            raise RecordError(f"{self._path} is of another instance ({told}); without --resume it is written anew")
        if len(whole) != whole.rfind("\n") + 1:
            self._path.write_text("".join(f"{line}\n" for line in lines))
        return samples
