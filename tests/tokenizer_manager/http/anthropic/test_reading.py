from __future__ import annotations

import json
from typing import Any

import pytest

from engine.runtime.config.engine_config import EngineConfig
from engine.runtime.config.server_config import ServerConfig
from engine.runtime.errors import RequestError
from engine.runtime.sampling_defaults import OPENAI_DEFAULTS
from engine.tokenizer_manager.conversation.conversation import ChoiceMode
from engine.tokenizer_manager.http.anthropic.convert import read_count, read_messages, user_of

HI = {"role": "user", "content": "hi"}
CACHED = {"type": "ephemeral"}
BASH = {
    "name": "Bash",
    "description": "Runs a command.",
    "input_schema": {
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
        "additionalProperties": False,
        "$schema": "https://json-schema.org/draft/2020-12/schema",
    },
}
CODING_AGENT: dict[str, Any] = {  # a request of a coding agent, by the documentation of its API
    "model": "m",
    "max_tokens": 32000,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cch=00000;"},
        {"type": "text", "text": "You are a coding agent.", "cache_control": CACHED},
        {"type": "text", "text": "Be brief.", "cache_control": CACHED},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<reminder>"},
                {"type": "text", "text": "list the files", "cache_control": CACHED},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I need ls.", "signature": "abc"},
                {"type": "text", "text": "Listing."},
                {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
                {"type": "tool_use", "id": "toolu_2", "name": "Bash", "input": {"command": "cd x"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.py"},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "content": [{"type": "text", "text": "no x"}],
                    "is_error": True,
                    "cache_control": CACHED,
                },
                {"type": "text", "text": "go on"},
            ],
        },
    ],
    "tools": [BASH, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "metadata": {"user_id": "user_1"},
    "stream": True,
}


SESSION = "6fa459ea-ee8a-3ca4-894e-db77e160355e"
STRICT = EngineConfig(server=ServerConfig(strict=True))


def read(**fields: Any) -> Any:
    body = {"messages": [HI], "max_tokens": 9} | fields
    return read_messages(body, EngineConfig(), OPENAI_DEFAULTS)[1]


def test_a_coding_agents_request():
    made = read(**CODING_AGENT)

    assert made.conversation.messages == [
        {"role": "system", "content": "You are a coding agent.\nBe brief."},
        {"role": "user", "content": "<reminder>\n\nlist the files"},
        {
            "role": "assistant",
            "content": "Listing.",
            "reasoning_content": "I need ls.",
            "tool_calls": [
                {
                    "id": f"toolu_{i}",
                    "type": "function",
                    "function": {"name": "Bash", "arguments": f'{{"command": "{command}"}}'},
                }
                for i, command in ((1, "ls"), (2, "cd x"))
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "a.py", "name": "Bash"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: no x", "name": "Bash"},
        {"role": "user", "content": "go on"},
    ]
    assert [tool.name for tool in made.conversation.tools] == ["Bash"]
    assert (made.conversation.reasoning.enabled, made.conversation.reasoning.budget) == (True, 31999)
    assert made.sampling.max_new_tokens == 32000
    assert len(made.warnings) == 1
    assert made.warnings[0].startswith('tools[1] ("web_search_20250305") was left out')


def test_counting_reads_the_same_conversation():
    _, counted = read_count(CODING_AGENT, STRICT)

    assert counted.conversation == read(**CODING_AGENT).conversation


@pytest.mark.parametrize(
    ("value", "warns"),
    [
        (None, False),
        ({"edits": []}, False),
        ({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, False),
        ({"edits": [{"type": "clear_tool_uses_20250919"}]}, True),
        (
            {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}]},
            True,
        ),
        ({"edits": "some"}, True),
        ("some", True),
    ],
)
def test_edits_of_the_context_are_a_warning(value: object, warns: bool):
    warning = "context_management has no effect: the whole conversation is the prompt"

    assert read(context_management=value).warnings == [warning] * warns
    body = {"messages": [HI], "context_management": value}
    _, counted = read_count(body, STRICT)
    assert counted.warnings == [warning] * warns


def test_a_last_message_of_the_assistant_is_continued():
    made = read(messages=[HI, {"role": "assistant", "content": "The answer is ("}])

    assert made.conversation.continue_final_message
    assert not read().conversation.continue_final_message


@pytest.mark.parametrize(
    ("choice", "mode", "parallel"),
    [
        ({"type": "auto"}, ChoiceMode.AUTO, True),
        ({"type": "any", "disable_parallel_tool_use": True}, ChoiceMode.REQUIRED, False),
        ({"type": "tool", "name": "Bash"}, ChoiceMode.NAMED, True),
        ({"type": "none"}, ChoiceMode.NONE, True),
    ],
)
def test_tool_choices(choice: dict[str, Any], mode: ChoiceMode, parallel: bool):
    made = read(tools=[BASH], tool_choice=choice).conversation.tool_choice

    assert (made.mode, made.parallel) == (mode, parallel)


def test_the_schema_of_the_answer_and_the_effort():
    form = {"type": "json_schema", "schema": {"type": "object"}}
    made = read(output_config={"format": form, "effort": "high"}, thinking={"type": "adaptive"})

    assert made.conversation.spec is not None
    assert made.constraint is not None
    assert made.constraint.param == "output_config.format.schema"
    assert (made.conversation.reasoning.effort, made.conversation.reasoning.enabled) == ("high", True)
    assert read(thinking={"type": "disabled"}).conversation.reasoning.enabled is False


def blocks(*content: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(content)}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        (blocks(), "messages"),
        (blocks({"type": "image", "source": {}}), "messages[0].content[0].type"),
        (blocks({"type": "tool_use", "id": "x", "name": "f"}), "messages[0].content[0].type"),
        (blocks({"type": "tool_result", "content": "x"}), "messages[0].content[0].tool_use_id"),
        (blocks({"type": "tool_use", "id": "x", "name": "f"}, role="assistant"), "messages[0]"),
        (blocks({"type": "tool_result", "tool_use_id": "x"}), "messages[0].content[0].tool_use_id"),
        (blocks({"type": "image"}), "messages[0].content[0].type"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"container": "c"}, "container"),
        ({"stop_sequences": [""]}, "stop_sequences"),
    ],
)
def test_errors_name_the_clients_path(fields: dict[str, Any], param: str):
    with pytest.raises(RequestError) as refused:
        read(**fields)

    assert refused.value.param == param
    assert refused.value.status == 400


def test_unknown_fields_of_blocks_are_not_silent():
    wibble = blocks({"type": "text", "text": "hi", "wibble": 1, "cache_control": CACHED})

    assert read(**wibble).warnings == ["unknown field messages[0].content[0].wibble was ignored"]
    with pytest.raises(RequestError) as refused:
        read_messages(wibble | {"max_tokens": 9}, STRICT, OPENAI_DEFAULTS)
    assert refused.value.param == "messages[0].content[0].wibble"


@pytest.mark.parametrize(
    ("metadata", "user"),
    [
        ({}, None),
        ({"metadata": {}}, None),
        ({"metadata": {"user_id": ""}}, None),
        ({"metadata": {"user_id": "ada"}}, "ada"),
        ({"metadata": {"user_id": f"user_1_account_2_session_{SESSION}"}}, "user_1_account_2"),
        ({"metadata": {"user_id": f"user_1_account__session_{SESSION}"}}, "user_1_account_"),
        ({"metadata": {"user_id": f"_session_{SESSION}"}}, None),
        ({"metadata": {"user_id": "a_session_of_ada"}}, "a_session_of_ada"),
        ({"metadata": {"user_id": json.dumps({"session_id": SESSION, "account_uuid": ""})}}, None),
        (
            {"metadata": {"user_id": json.dumps({"session_id": SESSION, "device_id": "d", "a": ""})}},
            '{"device_id":"d"}',
        ),
        ({"metadata": {"user_id": '{"b":2,"session_id":7,"a":1}'}}, '{"a":1,"b":2}'),
        ({"metadata": {"user_id": '{"device_id":"d"}'}}, '{"device_id":"d"}'),
        ({"metadata": {"user_id": '["session_id"]'}}, '["session_id"]'),
        ({"metadata": {"user_id": "[" * 100_000}}, "[" * 100_000),
        ({"metadata": {"user_id": '{"session_id":1,"n":' + "9" * 40 + "}"}}, '{"n":' + "9" * 40 + "}"),
    ],
)
def test_the_user_is_that_of_the_metadata_without_the_session(metadata, user):
    body = {"messages": [HI], "max_tokens": 9} | metadata
    request, _ = read_messages(body, EngineConfig(), OPENAI_DEFAULTS)
    assert user_of(request)[0] == user


def test_a_user_that_is_no_text_is_refused():
    body = {"messages": [HI], "max_tokens": 9, "metadata": {"user_id": 7}}
    request, _ = read_messages(body, EngineConfig(), OPENAI_DEFAULTS)
    with pytest.raises(RequestError) as caught:
        user_of(request)
    assert caught.value.param == "metadata.user_id"
