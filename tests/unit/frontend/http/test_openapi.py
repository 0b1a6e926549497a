"""The OpenAPI document says what the validators do."""

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from meshift.services.frontend.http.schemas import ChatRequest, TextRequest
from meshift.services.frontend.text.tokenizer import ChatTokenizer
from tests.unit.frontend.http.harness import HELLO, Shell, make_shell
from tests.unit.frontend.http.test_requests import HARMLESS, UNSUPPORTED


@pytest.fixture(scope="module")
def document(tiny_folder: Path, tiny: ChatTokenizer) -> dict[str, Any]:
    """As every such application has it."""
    return make_shell(tiny_folder, tiny).app.openapi()


def validator(document: dict[str, Any], name: str) -> Draft202012Validator:
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    return Draft202012Validator(schema)


async def test_it_is_served(shell: Shell, document: dict[str, Any]) -> None:
    response = await shell.get("/openapi.json")
    assert response.status_code == 200
    assert response.json() == json.loads(json.dumps(document))


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    def walk(value: object) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                assert value["$ref"].rpartition("/")[2] in document["components"]["schemas"]
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)

    walk(document)
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_it_lists_all_routes_and_fields(document: dict[str, Any]) -> None:
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/ready"} <= set(document["paths"])
    for model in (ChatRequest, TextRequest):
        fields = {info.alias or name for name, info in model.model_fields.items()}
        assert set(document["components"]["schemas"][model.__name__]["properties"]) == fields
    for path in ("/v1/chat/completions", "/v1/completions"):
        responses = document["paths"][path]["post"]["responses"]
        reference = responses["400"]["content"]["application/json"]["schema"]["$ref"]
        assert reference.endswith("/ErrorEnvelope")
        assert "422" not in responses


async def test_its_examples_are_valid_and_served(shell: Shell, document: dict[str, Any]) -> None:
    shell.plays(*shell.say("x"))
    for path in ("/v1/chat/completions", "/v1/completions"):
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        check = validator(document, content["schema"]["$ref"].rpartition("/")[2])
        for example in content["examples"].values():
            check.validate(example["value"])
            async with shell.client() as client:
                response = await client.post(path, json={**example["value"], "model": "tiny"})
            assert response.status_code == 200, response.text


async def test_answers_are_as_it_says(shell: Shell, document: dict[str, Any]) -> None:
    shell.plays(*shell.say("Paris"))
    chat = await shell.post({**HELLO, "logprobs": True, "top_logprobs": 1})
    validator(document, "ChatCompletion").validate(chat.json())
    text = await shell.post_text(prompt="x", logprobs=1)
    validator(document, "TextCompletion").validate(text.json())
    validator(document, "ErrorEnvelope").validate((await shell.post({})).json())


def test_it_accepts_what_the_validator_accepts_and_refuses_what_it_refuses(document: dict[str, Any]) -> None:
    check = validator(document, "ChatRequest")
    assert check.is_valid(HELLO)
    assert check.is_valid({**HELLO, **{name: value for name, value in HARMLESS.items() if name != "stream_options"}})
    for name, value in UNSUPPORTED.items():
        assert check.is_valid({**HELLO, name: value}) == (name == "tools"), name
    assert not check.is_valid({**HELLO, "temprature": 1})
    assert not check.is_valid({**HELLO, "temperature": 3})
    assert not check.is_valid({**HELLO, "n": 0})


@pytest.mark.parametrize("prompt", ["a", [5], ["a", "b"], [[5], [6]]])
def test_it_knows_the_forms_of_a_prompt(document: dict[str, Any], prompt: object) -> None:
    check = validator(document, "TextRequest")
    assert check.is_valid({"model": "tiny", "prompt": prompt})
    assert not check.is_valid({"model": "tiny", "prompt": {}})


async def test_there_is_a_page_to_read_it(shell: Shell) -> None:
    response = await shell.get("/docs")
    assert response.status_code == 200
    assert "openapi.json" in response.text
