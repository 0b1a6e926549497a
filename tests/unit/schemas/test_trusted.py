"""Messages that are made without validation."""

from typing import Any

import pytest
from pydantic import ValidationError

from meshift.schemas.base import trusted
from meshift.schemas.identity import Owner
from meshift.schemas.instances import LoadReport
from tests.support.reports import load_report


def values(report: LoadReport) -> dict[str, Any]:
    return {name: getattr(report, name) for name in LoadReport.model_fields if name not in ("kind", "version")}


def test_a_trusted_message_is_the_validated_one() -> None:
    validated = load_report("a", used=10, free=90, running=2)
    made = trusted(LoadReport, **values(validated))
    assert made == validated
    assert made.model_dump_json() == validated.model_dump_json()
    assert LoadReport.model_validate_json(made.model_dump_json()) == validated
    assert made.model_copy(update={"used": 11}).used == 11
    assert hash(made) == hash(validated)
    assert (made.kind, made.version) == (validated.kind, validated.version)


def test_it_is_frozen_and_others_are_not_touched() -> None:
    first = trusted(LoadReport, **values(load_report("a", used=10, free=90, running=2)))
    second = trusted(LoadReport, **{**values(first), "owner": Owner("b", 1)})
    with pytest.raises(ValidationError, match="frozen"):
        first.used = 3  # type: ignore[misc]
    assert (first.owner.instance_id, second.owner.instance_id) == ("a", "b")
    assert trusted(LoadReport, **{**values(first), "layers": (3, 4)}).layers == (3, 4)
    assert trusted(LoadReport, **values(first)).layers == ()
