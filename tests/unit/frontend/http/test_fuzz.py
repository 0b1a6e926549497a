"""Whatever a client sends, it is never the server's fault."""

import asyncio
import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshift.services.frontend.http.schemas import ChatRequest
from tests.support.examples import examples
from tests.unit.frontend.http.harness import CHAT, HELLO, Shell, error_of

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 3)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["tiny", "user", "text", "auto"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "x"]) | st.text(max_size=4), inner, max_size=4
        )
    ),
    max_leaves=8,
)
FIELDS = st.sampled_from(sorted(ChatRequest.model_fields)) | st.text(max_size=6)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer"]) | VALUES, "content": VALUES},
        optional={"name": VALUES},
    ),
    max_size=3,
)
BODIES = VALUES | st.dictionaries(FIELDS, VALUES, max_size=6).flatmap(
    lambda extra: st.sampled_from([{}, {"messages": extra.get("messages")}]).map(
        lambda changes: {**HELLO, **extra, **changes}
    )
)
SETTINGS = settings(
    max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


async def check(shell: Shell, body: bytes) -> None:
    async with shell.client() as client:
        response = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code < 500, response.text
    if response.status_code == 200:
        return
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert "Traceback" not in response.text


@SETTINGS
@given(body=BODIES)
def test_any_json_is_answered_or_refused(shell: Shell, body: Any) -> None:
    asyncio.run(check(shell, json.dumps(body).encode()))


@SETTINGS
@given(messages=MESSAGES)
def test_any_messages_are_answered_or_refused(shell: Shell, messages: Any) -> None:
    asyncio.run(check(shell, json.dumps({**HELLO, "messages": messages}, ensure_ascii=True).encode()))


@SETTINGS
@given(name=FIELDS, value=VALUES)
def test_any_value_of_any_field_is_answered_or_refused(shell: Shell, name: str, value: Any) -> None:
    asyncio.run(check(shell, json.dumps({**HELLO, name: value}).encode()))


@SETTINGS
@given(body=st.binary(max_size=64))
def test_any_bytes_are_refused(shell: Shell, body: bytes) -> None:
    asyncio.run(check(shell, body))
