from __future__ import annotations

from typing import Any

import pytest

from engine.runtime.config.engine_config import EngineConfig
from engine.runtime.errors import RequestError
from engine.runtime.sampling_defaults import OPENAI_DEFAULTS
from engine.tokenizer_manager.conversation.conversation import ChoiceMode
from engine.tokenizer_manager.http.responses.convert import namespaces_of, read_responses

SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "array", "items": {"type": "string"}}},
        "required": ["command"],
    },
}
CODING_AGENT: dict[str, Any] = {  # a request of a coding agent, by the documentation of its API
    "model": "m",
    "instructions": "You are a coding agent.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<permissions>"}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list the files"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "I need ls."}],
            "encrypted_content": None,
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Listing.", "annotations": []}],
        },
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "call_1",
            "name": "shell",
            "arguments": '{"command":["ls"]}',
        },
        {"type": "function_call_output", "call_id": "call_1", "output": "a.py\nb.py"},
    ],
    "tools": [
        SHELL,
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edits files.",
            "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
        },
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "client_metadata": {"x": "y"},
    "service_tier": "auto",
}


def read(**fields: Any) -> Any:
    return read_responses({"input": "hi"} | fields, EngineConfig(), OPENAI_DEFAULTS)[1]


def test_a_coding_agents_request():
    made = read(**CODING_AGENT)

    assert made.conversation.messages == [
        {"role": "system", "content": "You are a coding agent.\n\n<permissions>"},
        {"role": "user", "content": "<environment>\n\nlist the files"},
        {
            "role": "assistant",
            "content": "Listing.",
            "reasoning_content": "I need ls.",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "shell", "arguments": '{"command":["ls"]}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "a.py\nb.py", "name": "shell"},
    ]
    assert [(tool.name, tool.custom) for tool in made.conversation.tools] == [
        ("shell", False),
        ("apply_patch", True),
    ]
    assert made.conversation.tool_choice.parallel is False
    assert made.conversation.reasoning.effort == "medium"
    assert made.warnings == ["tools[2] (web_search) was left out: this server does not run tools"]


def test_a_custom_call_in_the_history_becomes_a_call_with_one_text():
    made = read(
        input=[
            {"role": "user", "content": "fix it"},
            {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": 'a "b"'},
            {
                "type": "custom_tool_call_output",
                "call_id": "c",
                "output": [{"type": "input_text", "text": "ok"}],
            },
        ]
    )

    call = made.conversation.messages[1]["tool_calls"][0]
    assert call["function"] == {"name": "apply_patch", "arguments": '{"input": "a \\"b\\""}'}
    assert made.conversation.messages[2]["content"] == "ok"


def test_tools_of_a_namespace_have_its_name_for_the_model():
    patch = {"type": "custom", "name": "apply_patch"}
    made = read(
        tools=[
            SHELL,
            {
                "type": "namespace",
                "name": "remote",
                "description": "x",
                "tools": [SHELL, patch, {"type": "mcp"}],
            },
        ],
        input=[
            {"role": "user", "content": "list"},
            {
                "type": "function_call",
                "call_id": "c",
                "name": "shell",
                "namespace": "remote",
                "arguments": "{}",
            },
            {"type": "function_call_output", "call_id": "c", "output": "a.py"},
        ],
    )

    names = [(tool.name, tool.custom) for tool in made.conversation.tools]
    assert names == [("shell", False), ("remote__shell", False), ("remote__apply_patch", True)]
    assert namespaces_of(made.conversation) == {
        "remote__shell": ("remote", "shell"),
        "remote__apply_patch": ("remote", "apply_patch"),
    }
    assert made.conversation.messages[1]["tool_calls"][0]["function"]["name"] == "remote__shell"
    assert made.conversation.messages[2]["name"] == "remote__shell"
    assert made.warnings == ["tools[1].tools[2] (mcp) was left out: this server does not run tools"]


def test_the_schema_of_the_answer():
    form = {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}
    made = read(text={"format": form})

    assert made.conversation.spec is not None
    assert made.constraint is not None
    assert made.constraint.param == "text.format.schema"
    assert read(text={"format": {"type": "json_object"}}).conversation.spec is not None
    assert read(text={"format": {"type": "text"}}).conversation.spec is None


def test_a_named_tool():
    made = read(tools=[SHELL], tool_choice={"type": "function", "name": "shell"})

    assert (made.conversation.tool_choice.mode, made.conversation.tool_choice.name) == (
        ChoiceMode.NAMED,
        "shell",
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"n": 2}, "n"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": 3}]}, "tools[0].tools"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
            "tools[0].tools[0].name",
        ),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "regex"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_errors_name_the_clients_path(fields: dict[str, Any], param: str):
    with pytest.raises(RequestError) as refused:
        read(**fields)

    assert refused.value.param == param
    assert refused.value.status == 400


def test_unknown_fields_of_items_are_not_silent():
    made = read(input=[{"role": "user", "content": "hi", "wibble": 1}])

    assert made.warnings == ["unknown field input[0].wibble was ignored"]


@pytest.mark.parametrize("name", ["whitespace_pattern", "guided_whitespace_pattern"])
@pytest.mark.parametrize(
    "form",
    [{"type": "json_object"}, {"type": "json_schema", "name": "x", "schema": {"type": "object"}}],
    ids=["json_object", "json_schema"],
)
def test_the_options_of_constraints_are_those_of_the_format_too(name, form):
    made = read(text={"format": form}, complete_json=False, **{name: " "})
    assert made.constraint is not None and made.constraint.use.spec is not None
    assert made.constraint.use.spec.whitespace_pattern == " " and not made.constraint.use.complete
    with pytest.raises(RequestError) as caught:
        read(text={"format": form}, **{name: "["})
    assert (caught.value.param, caught.value.code) == (name, "invalid_regex")


def test_a_regex_of_a_custom_tool_is_checked():
    form = {"type": "grammar", "syntax": "regex", "definition": "(?=a)"}
    with pytest.raises(RequestError) as caught:
        read(tools=[{"type": "custom", "name": "c", "format": form}])
    assert (caught.value.param, caught.value.code) == ("tools[0].format.definition", "invalid_regex")
    assert caught.value.message.startswith("tools[0].format.definition: ")
