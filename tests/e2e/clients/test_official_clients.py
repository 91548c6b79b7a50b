"""The clients of OpenAI, Anthropic and Ollama with the default model: a stream adds up to the plain answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import anthropic
import ollama
import openai
import pytest

from ..conftest import openai_client
from ..serving import DEADLINE_S, EngineServe
from .schemas import PERSON, QUESTION, WEATHER, WEATHER_QUESTION, Person, fits

pytestmark = [pytest.mark.real_process, pytest.mark.model, pytest.mark.slow]

MODEL: Final = "any"
GREEDY: Final[dict[str, Any]] = {"temperature": 0}
ASK: Final[Any] = [{"role": "user", "content": QUESTION}]
ASK_WEATHER: Final[Any] = [{"role": "user", "content": WEATHER_QUESTION}]
CHAT_TOOL: Final[Any] = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": WEATHER, "strict": True},
}
RESPONSES_TOOL: Final[Any] = {
    "type": "function",
    "name": "get_weather",
    "parameters": WEATHER,
    "strict": True,
}
MESSAGES_TOOL: Final[Any] = {"name": "get_weather", "input_schema": WEATHER, "strict": True}


@pytest.fixture(scope="module")
def openai_of(default_serve: EngineServe) -> Iterator[openai.OpenAI]:
    with openai_client(default_serve) as client:
        yield client


@pytest.fixture(scope="module")
def anthropic_of(default_serve: EngineServe) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=default_serve.url, api_key="unused", max_retries=0, timeout=DEADLINE_S
    ) as client:
        yield client


@pytest.fixture(scope="module")
def ollama_of(default_serve: EngineServe) -> Iterator[ollama.Client]:
    with ollama.Client(default_serve.url, timeout=DEADLINE_S) as client:
        yield client


# ---------------------------------------------------------------- openai


def test_parsed_chats(openai_of: openai.OpenAI):
    fields: dict[str, Any] = {"model": MODEL, "messages": ASK, "max_tokens": 200, **GREEDY}
    whole = openai_of.chat.completions.parse(**fields, response_format=Person).choices[0]
    with openai_of.chat.completions.stream(**fields, response_format=Person) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion().choices[0]

    assert isinstance(whole.message.parsed, Person)
    assert streamed.message.parsed == whole.message.parsed
    assert streamed.finish_reason == whole.finish_reason == "stop"
    assert kinds >= {"chunk", "content.delta", "content.done"}


def test_parsed_tool_calls_of_chats(openai_of: openai.OpenAI):
    class GetWeather(Person):
        """Looks a person up."""

    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": ASK,
        "max_tokens": 200,
        "tools": [openai.pydantic_function_tool(GetWeather)],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        **GREEDY,
    }
    whole = openai_of.chat.completions.parse(**fields).choices[0]
    with openai_of.chat.completions.stream(**fields) as stream:
        list(stream)
        streamed = stream.get_final_completion().choices[0]

    for choice in (whole, streamed):
        [call] = choice.message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, GetWeather)
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content


def test_parsed_responses(openai_of: openai.OpenAI):
    fields: dict[str, Any] = {
        "model": MODEL,
        "input": QUESTION,
        "max_output_tokens": 200,
        "text_format": Person,
        **GREEDY,
    }
    whole = openai_of.responses.parse(**fields)
    with openai_of.responses.stream(**fields) as stream:
        events = list(stream)
        streamed = stream.get_final_response()

    assert isinstance(whole.output_parsed, Person)
    assert streamed.output_parsed == whole.output_parsed
    assert streamed.output_text == whole.output_text
    assert streamed.usage is not None and whole.usage is not None
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == sorted(
        event.sequence_number for event in events if hasattr(event, "sequence_number")
    )
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text


def test_a_conversation_with_a_tool_over_responses(openai_of: openai.OpenAI):
    question: Any = {"role": "user", "content": WEATHER_QUESTION}
    fields: dict[str, Any] = {
        "model": MODEL,
        "tools": [RESPONSES_TOOL],
        "max_output_tokens": 200,
        "tool_choice": {"type": "function", "name": "get_weather"},
        **GREEDY,
    }
    whole = openai_of.responses.create(input=[question], **fields)
    with openai_of.responses.stream(input=[question], **fields) as stream:
        list(stream)
        streamed = stream.get_final_response()
    [call], [again] = whole.output, streamed.output
    assert call.type == again.type == "function_call"
    assert call.arguments == again.arguments
    assert fits(json.loads(call.arguments), WEATHER)

    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
    history: Any = [question, *(item.model_dump(exclude_none=True) for item in whole.output), result]
    after = openai_of.responses.create(input=history, **fields | {"tool_choice": "none"})
    assert after.output_text
    assert [item.type for item in after.output] == ["message"]
    counted = openai_of.responses.input_tokens.count(
        input=history, model=MODEL, tools=[RESPONSES_TOOL], tool_choice="none"
    )
    assert after.usage is not None
    assert counted.input_tokens == after.usage.input_tokens


# ---------------------------------------------------------------- anthropic


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": ASK},
        {"messages": ASK, "system": "Be brief.", "stop_sequences": ["."]},
        {"messages": ASK, "output_config": {"format": {"type": "json_schema", "schema": PERSON}}},
        {"messages": ASK_WEATHER, "tools": [MESSAGES_TOOL], "tool_choice": {"type": "any"}},
        {"messages": ASK_WEATHER, "tools": [MESSAGES_TOOL]},
    ],
    ids=["text", "stop sequence", "schema", "forced call", "free call"],
)
def test_the_accumulated_message_is_the_message(anthropic_of: anthropic.Anthropic, fields: dict[str, Any]):
    limit: dict[str, Any] = {"model": MODEL, "max_tokens": 120, "extra_body": GREEDY}
    whole = anthropic_of.messages.create(**limit, **fields)
    with anthropic_of.messages.stream(**limit, **fields) as stream:
        streamed = stream.get_final_message()

    def said(message: anthropic.types.Message) -> list[dict[str, Any]]:
        return [block.model_dump(include={"type", "text", "name", "input"}) for block in message.content]

    assert said(streamed) == said(whole)
    assert (streamed.role, streamed.type, streamed.model) == (whole.role, whole.type, whole.model)
    assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    counted = anthropic_of.messages.count_tokens(
        model=MODEL, **{name: value for name, value in fields.items() if name != "stop_sequences"}
    ).input_tokens
    for usage in (whole.usage, streamed.usage):
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted
    if "tool_choice" in fields:
        assert all(block.type == "tool_use" and fits(block.input, WEATHER) for block in whole.content)
        assert whole.stop_reason in ("tool_use", "max_tokens")
    if "output_config" in fields:
        [block] = whole.content
        assert block.type == "text"
        assert fits(json.loads(block.text), PERSON)


def test_a_result_goes_back(anthropic_of: anthropic.Anthropic):
    limit: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 120,
        "tools": [MESSAGES_TOOL],
        "extra_body": GREEDY,
    }
    one_call: Any = {"type": "tool", "name": "get_weather"}
    first = anthropic_of.messages.create(messages=ASK_WEATHER, tool_choice=one_call, **limit)
    [call] = first.content
    assert call.type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees"}
    history: Any = [
        *ASK_WEATHER,
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
        {"role": "user", "content": [result]},
    ]
    after = anthropic_of.messages.create(messages=history, tool_choice={"type": "none"}, **limit)

    assert [block.type for block in after.content] == ["text"]


# ---------------------------------------------------------------- ollama


def test_ollama_answers_by_a_schema(ollama_of: ollama.Client):
    options = {"temperature": 0, "num_predict": 200}
    whole = ollama_of.chat(MODEL, ASK, format=Person.model_json_schema(), options=options)
    parts = list(ollama_of.chat(MODEL, ASK, format=Person.model_json_schema(), options=options, stream=True))
    text = ollama_of.generate(MODEL, QUESTION, format=PERSON, options=options).response

    assert whole.message.content is not None and text is not None
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert (whole.done_reason, parts[-1].done_reason) == ("stop", "stop")
    assert parts[-1].eval_count == whole.eval_count
    assert Person.model_validate_json(whole.message.content) == Person.model_validate_json(text)


def test_ollama_calls_tools(ollama_of: ollama.Client):
    def get_weather(city: str) -> str:
        """Get the weather of a city.

        Args:
            city: The name of the city.

        Returns:
            The weather.
        """
        return f"18 degrees in {city}"

    options = {"temperature": 0, "num_predict": 200}
    whole = ollama_of.chat(MODEL, ASK_WEATHER, tools=[get_weather], options=options)
    parts = list(ollama_of.chat(MODEL, ASK_WEATHER, tools=[get_weather], options=options, stream=True))
    streamed = [call for part in parts for call in part.message.tool_calls or []]

    assert streamed == list(whole.message.tool_calls or [])
    assert "".join(part.message.content or "" for part in parts) == (whole.message.content or "")
    assert whole.message.content or whole.message.tool_calls
    history: Any = [
        *ASK_WEATHER,
        whole.message,
        {"role": "tool", "tool_name": "get_weather", "content": "18"},
    ]
    assert ollama_of.chat(MODEL, history, options=options).done_reason in ("stop", "length")
