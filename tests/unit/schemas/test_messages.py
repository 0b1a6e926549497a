"""Every message: round trip, and refusal of what it isn't."""

import importlib
import json
import pkgutil
from base64 import b64encode
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import ValidationError

import meshift.schemas
from meshift.schemas.base import PROTOCOL_VERSION, Message
from meshift.schemas.errors import InvalidRequest
from meshift.schemas.instances import DispatchRequest, DrainRequest
from meshift.schemas.limits import MOVE_STATE_BYTES_MAX
from meshift.schemas.moves import Fence, MoveAbort, MoveCommit, MoveOrder, MoveReserve
from meshift.schemas.requests import FinishReason, ReplayRequest, Submit, TokenBatch
from meshift.services.bus.codec import decode, encode
from tests.unit.schemas.samples import KEY, OWNER, SAMPLES, TOKENS, message_types

BY_NAME = {type(sample).__name__: sample for sample in SAMPLES}


WITH_OBJECTS = frozenset(
    {"KeptPolicy", "PolicyRequest", "PolicyReply", "DecisionsReply", "ReconfigureReport", "ReconfigurationsReply"}
)
"""They carry JSON objects, which have no hash."""


def all_message_types() -> list[type[Message]]:
    """Those of the package `meshift.schemas`."""
    for module in pkgutil.iter_modules(meshift.schemas.__path__):
        importlib.import_module(f"meshift.schemas.{module.name}")
    return [cls for cls in message_types() if cls.__module__.startswith("meshift.schemas.")]


def fields_of(sample: Message) -> dict[str, Any]:
    """Its JSON form."""
    fields: dict[str, Any] = json.loads(encode(sample))
    return fields


def refusal(message_type: type[Message], fields: dict[str, Any]) -> str | None:
    """The field over which a message is refused."""
    with pytest.raises(InvalidRequest) as caught:
        decode(message_type, json.dumps(fields).encode())
    return caught.value.param


def test_every_message_has_a_sample() -> None:
    assert {cls.__name__ for cls in all_message_types()} == set(BY_NAME)


def test_every_message_has_a_kind_of_its_own() -> None:
    kinds: dict[str, str] = {}
    for cls in all_message_types():
        field = cls.model_fields["kind"]
        assert get_origin(field.annotation) is Literal, f"{cls.__name__}.kind must be a Literal"
        (kind,) = get_args(field.annotation)
        assert field.default == kind
        assert kind not in kinds, f"{cls.__name__} and {kinds[kind]} are both {kind!r}"
        kinds[kind] = cls.__name__
    assert kinds


@pytest.mark.parametrize("sample", SAMPLES, ids=list(BY_NAME))
class TestEachMessage:
    def test_it_comes_back_as_it_was(self, sample: Message) -> None:
        payload = encode(sample)
        again = decode(type(sample), payload)
        assert again == sample
        assert type(again) is type(sample)
        assert encode(again) == payload
        if type(sample).__name__ not in WITH_OBJECTS:
            assert hash(again) == hash(sample)

    def test_its_samples_leave_no_default(self, sample: Message) -> None:
        left = {"version", "kind"}
        defaults = {
            name for name, field in type(sample).model_fields.items()
            if not field.is_required() and getattr(sample, name) == field.default
        }  # fmt: skip
        assert defaults <= left

    def test_it_refuses_unknown_fields(self, sample: Message) -> None:
        assert refusal(type(sample), fields_of(sample) | {"colour": "red"}) == "colour"

    def test_it_refuses_other_kinds(self, sample: Message) -> None:
        for other in SAMPLES:
            if other is not sample:
                with pytest.raises(InvalidRequest):
                    decode(type(sample), encode(other))
        assert refusal(type(sample), fields_of(sample) | {"kind": "other"}) == "kind"

    @pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
    def test_it_refuses_other_versions(self, sample: Message, version: int) -> None:
        with pytest.raises(InvalidRequest, match="upgrade the older service") as caught:
            decode(type(sample), json.dumps(fields_of(sample) | {"version": version}).encode())
        assert caught.value.param == "version"

    def test_it_says_its_kind_and_version(self, sample: Message) -> None:
        fields = fields_of(sample)
        assert fields["version"] == PROTOCOL_VERSION
        assert fields["kind"]

    def test_it_needs_its_required_fields(self, sample: Message) -> None:
        for name, field in type(sample).model_fields.items():
            if field.is_required():
                fields = fields_of(sample)
                del fields[name]
                assert refusal(type(sample), fields) == name

    def test_it_is_frozen(self, sample: Message) -> None:
        with pytest.raises(ValidationError, match="frozen"):
            sample.version = 3  # type: ignore[misc]


def test_nested_parts_refuse_unknown_fields_too() -> None:
    fields = fields_of(BY_NAME["Submit"])
    fields["sampling"]["colour"] = "red"
    assert refusal(Submit, fields) == "sampling.colour"
    fields = fields_of(BY_NAME["TokenBatch"])
    fields["finishes"][0]["finish"]["colour"] = "red"
    assert refusal(TokenBatch, fields) == "finishes.0.finish.colour"


@pytest.mark.parametrize(
    ("message_type", "change", "param"),
    [
        (Submit, {"request_id": ""}, "request_id"),
        (Submit, {"request_id": "x" * 129}, "request_id"),
        (Submit, {"attempt": 0}, "attempt"),
        (Submit, {"hop": -1}, "hop"),
        (Submit, {"prompt": "AAAA"}, "prompt"),
        (Submit, {"prompt": "!"}, "prompt"),
        (ReplayRequest, {"start": -1}, "start"),
        (DispatchRequest, {"demand": 0}, "demand"),
        (DrainRequest, {"deadline_s": -0.5}, "deadline_s"),
        (MoveOrder, {"deadline_s": 0.0}, "deadline_s"),
        (MoveReserve, {"hop": 0}, "hop"),
        (MoveReserve, {"slots": -1}, "slots"),
        (MoveReserve, {"tokens": "AAAA"}, "tokens"),
        (MoveReserve, {"layout": {"layer_ranges": []}}, "layout.layer_ranges"),
        (MoveCommit, {"state": b64encode(bytes(MOVE_STATE_BYTES_MAX + 1)).decode()}, "state"),
        (MoveAbort, {"reason": "x" * 1025}, "reason"),
    ],
)
def test_values_out_of_range(message_type: type[Message], change: dict[str, Any], param: str) -> None:
    assert refusal(message_type, fields_of(BY_NAME[message_type.__name__]) | change) == param


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0), ("min_new_tokens", -1), ("temperature", 2.1), ("temperature", -0.1), ("top_p", 0.0),
        ("top_p", 1.1), ("top_k", -2), ("min_p", 1.1), ("frequency_penalty", 2.1), ("presence_penalty", -2.1),
        ("repetition_penalty", 0.0), ("stop", ["x"] * 17),
    ],
)  # fmt: skip
def test_sampling_values_out_of_range(name: str, value: object) -> None:
    fields = fields_of(BY_NAME["Submit"])
    fields["sampling"][name] = value
    assert refusal(Submit, fields) == f"sampling.{name}"


def test_stop_strings_have_a_length() -> None:
    for text in ("", "x" * 257):
        fields = fields_of(BY_NAME["Submit"])
        fields["sampling"]["stop"] = ["fine", text]
        assert refusal(Submit, fields) == "sampling.stop.1"


@pytest.mark.parametrize("matched", ["END", 2, None])
def test_a_matched_stop_keeps_its_type(matched: str | int | None) -> None:
    batch = BY_NAME["TokenBatch"]
    assert isinstance(batch, TokenBatch)
    finish = batch.finishes[0].finish.model_copy(update={"matched_stop": matched, "reason": FinishReason.STOP})
    row = batch.finishes[0].model_copy(update={"finish": finish})
    again = decode(TokenBatch, encode(batch.model_copy(update={"finishes": (row,)})))
    assert again.finishes[0].finish.matched_stop == matched
    assert type(again.finishes[0].finish.matched_stop) is type(matched)


def test_keys() -> None:
    submit, replay = BY_NAME["Submit"], BY_NAME["ReplayRequest"]
    assert isinstance(submit, Submit)
    assert isinstance(replay, ReplayRequest)
    assert submit.key == replay.key == KEY
    assert KEY < KEY._replace(hop=2) < KEY._replace(attempt=3, hop=0)
    assert (str(KEY), str(OWNER)) == ("r1/2.1", "w1#2")
    assert submit.prompt == TOKENS


def test_keys_of_a_move() -> None:
    fence = BY_NAME["Fence"]
    assert isinstance(fence, Fence)
    assert fence.destination_key == KEY
    assert fence.source_key == KEY._replace(hop=0)
