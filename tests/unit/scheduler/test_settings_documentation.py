"""docs/operations.md has every setting of the policy, with its default and its meaning."""

from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from meshift.services.scheduler.policy.settings import PolicySettings

DOCUMENT = Path(__file__).parents[3] / "docs" / "operations.md"


def settings(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, object, str]]:
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            yield from settings(type(default), f"{prefix}{name}.")
        elif name != "version":
            yield f"{prefix}{name}", default, field.description or ""


def shown(default: object) -> str:
    if default is None:
        return "the policy's own"
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)


def test_every_setting_is_in_the_table_as_it_is() -> None:
    lines = DOCUMENT.read_text().splitlines()
    missing = [
        row
        for name, default, description in settings(PolicySettings)
        if (row := f"| `{name}` | {shown(default)} | {description} |") not in lines
    ]
    assert not missing
