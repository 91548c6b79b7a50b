"""Messages of chats: what becomes of each form, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from engine.runtime.config.answer_config import RequestLimits
from engine.runtime.errors import RequestError
from engine.tokenizer_manager.http.openai.messages import template_messages


def read(*messages: dict[str, Any], strict: bool = False) -> list[dict[str, Any]]:
    return template_messages(list(messages), strict=strict, limits=RequestLimits())[0]


def call(**function: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": function}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
        ({"role": "user", "content": "x", "name": "ann"}, {"role": "user", "content": "x", "name": "ann"}),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "a\nb"},
        ),
        ({"role": "assistant", "content": None, "refusal": None}, {"role": "assistant", "content": ""}),
        (
            {"role": "tool", "content": "x", "tool_call_id": "c1"},
            {"role": "tool", "content": "x", "tool_call_id": "c1"},
        ),
        (
            {"role": "tool", "content": [{"type": "text", "text": "x"}], "tool_call_id": "c1"},
            {"role": "tool", "content": "x", "tool_call_id": "c1"},
        ),
        ({"role": "tool", "tool_call_id": "c1"}, {"role": "tool", "content": "", "tool_call_id": "c1"}),
        (
            {"role": "function", "name": "f", "content": "x"},
            {"role": "tool", "content": "x", "name": "f"},
        ),
        (
            {"role": "assistant", "content": "x", "reasoning_content": "r"},
            {"role": "assistant", "content": "x", "reasoning_content": "r"},
        ),
        (
            {"role": "assistant", "content": "x", "reasoning": "r"},
            {"role": "assistant", "content": "x", "reasoning_content": "r"},
        ),
    ],
)
def test_a_message_for_the_template(message, expected):
    calls = {"role": "assistant", "tool_calls": [call(name="f", arguments="{}") | {"id": "c1"}]}
    assert read(calls, message)[-1] == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a":1}', '{"a":1}'),
        ('{"a": "é", "b":[]}', '{"a": "é", "b":[]}'),  # as it is
        ('{"a": 1', '{"a": 1'),  # a call that was cut
        ({"a": "é"}, '{"a": "é"}'),
        ("", "{}"),
        (None, "{}"),
    ],
)
def test_arguments_of_calls(arguments, expected):
    [message] = read({"role": "assistant", "tool_calls": [call(name="f", arguments=arguments)]})

    assert message == {"role": "assistant", "content": "", "tool_calls": [call(name="f", arguments=expected)]}


def test_the_old_function_call_is_a_tool_call():
    [message] = read(
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    )

    assert [each["function"] for each in message["tool_calls"]] == [{"name": "f", "arguments": "{}"}]


def test_a_call_of_a_custom_tool():
    custom = {"id": "c1", "type": "custom", "custom": {"name": "shell", "input": 'ls "é"'}}
    [message] = read({"role": "assistant", "tool_calls": [custom]})

    assert message["tool_calls"] == [call(name="shell", arguments='{"input": "ls \\"é\\""}')]


@pytest.mark.parametrize("value", [[], None])
def test_no_calls(value):
    assert read({"role": "assistant", "content": "x", "tool_calls": value}) == [
        {"role": "assistant", "content": "x"}
    ]


@pytest.mark.parametrize(
    ("message", "param", "text"),
    [
        ({"content": "x"}, "messages[0].role", "role"),
        ({"role": "robot", "content": "x"}, "messages[0].role", "use one of system"),
        ({"role": "user"}, "messages[0].content", "is missing"),
        ({"role": "user", "content": None}, "messages[0].content", "is missing"),
        ({"role": "system", "content": 5}, "messages[0].content", "string"),
        ({"role": "user", "content": [{"type": "poem"}]}, "messages[0].content[0].type", '"text"'),
        (
            {"role": "user", "content": [{"type": "image_url"}]},
            "messages[0].content[0].type",
            "the engine serves only the text of this model; leave it out",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text", "text"),
        (
            {"role": "user", "content": "x", "tool_calls": [call(name="f")]},
            "messages[0].tool_calls",
            "only messages of the assistant",
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function"}]},
            "messages[0].tool_calls[0].function",
            "is missing",
        ),
        (
            {"role": "assistant", "tool_calls": [call(arguments="{}")]},
            "messages[0].tool_calls[0].function.name",
            "name",
        ),
        (
            {"role": "assistant", "tool_calls": [call(name="f", arguments=[1])]},
            "messages[0].tool_calls[0].function.arguments",
            "arguments",
        ),
        ({"role": "assistant", "tool_calls": "x"}, "messages[0].tool_calls", "list"),
        (
            {"role": "assistant", "content": "x", "audio": {"id": "a"}},
            "messages[0].audio",
            "not supported yet",
        ),
    ],
)
def test_refused(message, param, text):
    with pytest.raises(RequestError) as caught:
        read(message)

    assert caught.value.param == param, caught.value.message
    assert text in caught.value.message


def test_unknown_fields_are_told():
    message = {"role": "user", "content": "x", "mood": "good"}
    _, warnings = template_messages([message], strict=False, limits=RequestLimits())
    assert warnings == ["unknown field messages[0].mood was ignored"]

    with pytest.raises(RequestError, match=r"messages\[0\].mood is not a field"):
        read(message, strict=True)
