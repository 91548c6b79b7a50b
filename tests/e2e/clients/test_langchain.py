"""`ChatOpenAI` of langchain-openai with the default model: its three ways to structured output, tools, streams."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any, Final, cast

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from ..serving import DEADLINE_S, EngineServe
from .schemas import PERSON, QUESTION, WEATHER_QUESTION, Person, fits

pytestmark = [pytest.mark.real_process, pytest.mark.model, pytest.mark.slow]

WAYS: Final = ("json_schema", "function_calling", "json_mode")


@tool
def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"18 degrees in {city}"


def added(parts: Iterable[AIMessage]) -> AIMessageChunk:
    """The chunks of a stream as one message."""
    return functools.reduce(operator.add, cast("Iterable[AIMessageChunk]", parts))


@pytest.fixture(scope="module")
def chat(default_serve: EngineServe) -> ChatOpenAI:
    return ChatOpenAI(
        model="any",
        base_url=f"{default_serve.url}/v1",
        api_key=SecretStr("unused"),
        temperature=0,
        max_completion_tokens=200,
        max_retries=0,
        timeout=DEADLINE_S,
    )


@pytest.mark.parametrize("way", WAYS[:2])
def test_a_model_of_pydantic(chat: ChatOpenAI, way: Any):
    found = chat.with_structured_output(Person, method=way, strict=True).invoke(QUESTION)

    assert isinstance(found, Person)


@pytest.mark.parametrize("way", WAYS)
def test_a_schema(chat: ChatOpenAI, way: Any):
    schema = PERSON | {"title": "person", "description": "A person."}
    strict = None if way == "json_mode" else True
    runnable = chat.with_structured_output(schema, method=way, strict=strict, include_raw=True)
    found = cast("dict[str, Any]", runnable.invoke(QUESTION))

    assert found["parsing_error"] is None
    assert isinstance(found["parsed"], dict)
    assert way == "json_mode" or fits(found["parsed"], PERSON)


def test_structured_output_streams(chat: ChatOpenAI):
    parts = list(
        chat.with_structured_output(PERSON | {"title": "person"}, method="json_schema").stream(QUESTION)
    )

    assert len(parts) > 1
    assert fits(parts[-1], PERSON)


@pytest.mark.parametrize("choice", ["any", "get_weather"])
def test_a_forced_tool(chat: ChatOpenAI, choice: str):
    bound = chat.bind_tools([get_weather], tool_choice=choice, strict=True)
    whole = bound.invoke(WEATHER_QUESTION)
    streamed = added(bound.stream(WEATHER_QUESTION))

    for message in (whole, streamed):
        assert message.tool_calls
        assert not message.invalid_tool_calls
        assert all(set(call["args"]) == {"city"} for call in message.tool_calls)
    assert [call["args"] for call in streamed.tool_calls] == [call["args"] for call in whole.tool_calls]
    history = [
        HumanMessage(WEATHER_QUESTION),
        whole,
        *(ToolMessage("18", tool_call_id=call["id"]) for call in whole.tool_calls),
    ]
    assert chat.bind_tools([get_weather], tool_choice="none").invoke(history).tool_calls == []


def test_a_stream_is_the_answer(chat: ChatOpenAI):
    whole = chat.invoke(QUESTION)
    parts = list(chat.stream(QUESTION, stream_usage=True))

    assert "".join(part.text for part in parts) == whole.text
    streamed = added(parts)
    assert streamed.usage_metadata is not None and whole.usage_metadata is not None
    assert streamed.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
    assert streamed.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]


def test_the_responses_api(chat: ChatOpenAI):
    """The same class speaks `/v1/responses`, too."""
    responses = chat.model_copy(update={"use_responses_api": True})
    found = responses.with_structured_output(Person, method="json_schema", strict=True).invoke(QUESTION)
    called = responses.bind_tools([get_weather], tool_choice="get_weather", strict=True).invoke(
        WEATHER_QUESTION
    )

    assert isinstance(found, Person)
    assert [call["name"] for call in called.tool_calls] == ["get_weather"]
