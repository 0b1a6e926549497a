"""Names: those of the conventions are theirs, ours are ours, none is used twice."""

import pytest

from meshift.tracing import names

CONSTANTS = {name: value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)}


def test_names_are_distinct_and_well_formed() -> None:
    assert len(set(CONSTANTS.values())) == len(CONSTANTS)
    for name, value in CONSTANTS.items():
        operation = name.startswith("OPERATION_")
        assert operation or value == "error.type" or value.startswith(("gen_ai.", "http.", "meshift.")), name
        assert value == value.lower(), name
        assert " " not in value, name


def test_conventions_names_exist_there() -> None:
    attributes = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
    metrics = pytest.importorskip("opentelemetry.semconv._incubating.metrics.gen_ai_metrics")
    known = {
        value for module in (attributes, metrics) for name, value in vars(module).items() if name.startswith("GEN_AI_")
    }
    ours = {value for value in CONSTANTS.values() if value.startswith("gen_ai.")}
    assert ours <= known
    operations = {member.value for member in attributes.GenAiOperationNameValues}
    assert {names.OPERATION_CHAT, names.OPERATION_COMPLETION} <= operations


def test_request_span_is_operation_and_model() -> None:
    assert names.request_span(names.OPERATION_CHAT, "llama-7b") == "chat llama-7b"
