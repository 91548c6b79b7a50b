"""Tools and tool choices in the forms of OpenAI's APIs."""

from __future__ import annotations

from typing import Any

import pytest

from engine.runtime.errors import RequestError
from engine.runtime.grammar_use import GrammarKind, GrammarSpec
from engine.tokenizer_manager.conversation.conversation import ChoiceMode, Tool, ToolChoice
from engine.tokenizer_manager.http.openai.tools import choice_of, function_choice_of, function_of, tool_of

SCHEMA = {"type": "object", "properties": {}}
LARK = {"syntax": "lark", "definition": 'start: "a"'}


@pytest.mark.parametrize(
    ("value", "tool"),
    [
        ({"type": "function", "function": {"name": "f"}}, Tool(name="f")),
        ({"type": "function", "name": "f"}, Tool(name="f")),
        (
            {
                "type": "function",
                "function": {"name": "f", "description": None, "parameters": None, "strict": None},
            },
            Tool(name="f"),
        ),
        (
            {
                "type": "function",
                "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True},
            },
            Tool(name="f", description="d", parameters=SCHEMA, strict=True),
        ),
        (
            {"type": "function", "name": "f", "parameters": SCHEMA, "strict": False},
            Tool(name="f", parameters=SCHEMA),
        ),
        ({"type": "custom", "custom": {"name": "c"}}, Tool(name="c", custom=True)),
        ({"type": "custom", "name": "c", "format": {"type": "text"}}, Tool(name="c", custom=True)),
        (
            {"type": "custom", "custom": {"name": "c", "format": {"type": "grammar", "grammar": LARK}}},
            Tool(name="c", custom=True, custom_grammar=GrammarSpec(GrammarKind.LARK, 'start: "a"')),
        ),
        (
            {
                "type": "custom",
                "name": "c",
                "format": {"type": "grammar", "syntax": "regex", "definition": "a+"},
            },
            Tool(name="c", custom=True, custom_grammar=GrammarSpec(GrammarKind.REGEX, "a+")),
        ),
        (  # as a grammar reads it: without the anchors, which the formats of calls refuse inside a group
            {
                "type": "custom",
                "name": "c",
                "format": {"type": "grammar", "syntax": "regex", "definition": "^(?:^a+|b$)$"},
            },
            Tool(name="c", custom=True, custom_grammar=GrammarSpec(GrammarKind.REGEX, "(?:a+|b)")),
        ),
    ],
)
def test_a_tool(value, tool):
    assert tool_of(value, "tools[0]", []) == tool


@pytest.mark.parametrize(
    ("value", "param"),
    [
        (5, "tools[0]"),
        ({}, "tools[0].type"),
        ({"type": "function"}, "tools[0].name"),
        ({"type": "function", "function": None}, "tools[0].name"),
        ({"type": "function", "function": {"name": 5}}, "tools[0].function.name"),
        ({"type": "function", "function": {"name": "f", "description": 5}}, "tools[0].function.description"),
        ({"type": "function", "function": {"name": "f", "parameters": []}}, "tools[0].function.parameters"),
        ({"type": "function", "function": {"name": "f", "strict": "yes"}}, "tools[0].function.strict"),
        ({"type": "custom", "name": "c", "format": "text"}, "tools[0].format"),
        ({"type": "custom", "name": "c", "format": {"type": "x"}}, "tools[0].format.type"),
        (
            {
                "type": "custom",
                "name": "c",
                "format": {"type": "grammar", "grammar": {"syntax": "x", "definition": ""}},
            },
            "tools[0].format.grammar.syntax",
        ),
        (
            {"type": "custom", "name": "c", "format": {"type": "grammar", "grammar": {"syntax": "lark"}}},
            "tools[0].format.grammar.definition",
        ),
    ],
)
def test_no_tool(value, param):
    with pytest.raises(RequestError) as caught:
        tool_of(value, "tools[0]", [])

    assert caught.value.param == param
    assert caught.value.message.startswith(param)


def test_a_function_of_the_old_form():
    assert function_of({"name": "f", "parameters": SCHEMA}, "functions[0]") == Tool(
        name="f", parameters=SCHEMA
    )


ALLOWED: dict[str, Any] = {
    "mode": "required",
    "tools": [{"type": "function", "function": {"name": "f"}}, {"type": "custom", "custom": {"name": "c"}}],
}


@pytest.mark.parametrize(
    ("value", "choice"),
    [
        (None, ToolChoice()),
        ("none", ToolChoice(mode=ChoiceMode.NONE)),
        ("auto", ToolChoice()),
        ("required", ToolChoice(mode=ChoiceMode.REQUIRED)),
        (
            {"type": "function", "function": {"name": "f"}},
            ToolChoice(mode=ChoiceMode.NAMED, name="f"),
        ),
        ({"type": "function", "name": "f"}, ToolChoice(mode=ChoiceMode.NAMED, name="f")),
        ({"type": "custom", "custom": {"name": "c"}}, ToolChoice(mode=ChoiceMode.NAMED, name="c")),
        (
            {"type": "allowed_tools", "allowed_tools": ALLOWED},
            ToolChoice(mode=ChoiceMode.REQUIRED, allowed=("f", "c")),
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            ToolChoice(allowed=("f",)),
        ),
    ],
)
@pytest.mark.parametrize("parallel", [None, True, False])
def test_a_choice(value, choice, parallel):
    made = choice_of(value, parallel)

    assert (made.mode, made.name, made.allowed) == (choice.mode, choice.name, choice.allowed)
    assert made.parallel is (parallel is not False)


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("sometimes", "tool_choice"),
        (5, "tool_choice"),
        ({"type": "function"}, "tool_choice.name"),
        ({"type": "function", "function": {}}, "tool_choice.function.name"),
        ({"type": "file_search"}, "tool_choice.type"),
        ({"type": "allowed_tools", "allowed_tools": 5}, "tool_choice.allowed_tools"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "none"}}, "tool_choice.allowed_tools.mode"),
        ({"type": "allowed_tools", "allowed_tools": {}}, "tool_choice.allowed_tools.tools"),
        ({"type": "allowed_tools", "tools": [5]}, "tool_choice.tools[0]"),
        ({"type": "allowed_tools", "tools": [{"type": "function"}]}, "tool_choice.tools[0].name"),
    ],
)
def test_no_choice(value, param):
    with pytest.raises(RequestError) as caught:
        choice_of(value, None)

    assert caught.value.param == param
    assert caught.value.message.startswith(param)


def test_choices_of_the_old_form():
    assert function_choice_of(None).mode is ChoiceMode.AUTO
    assert function_choice_of("none").mode is ChoiceMode.NONE
    named = function_choice_of({"name": "f"})
    assert (named.mode, named.name, named.parallel) == (ChoiceMode.NAMED, "f", False)
    for value in ("required", 5, {"name": 5}):
        with pytest.raises(RequestError) as caught:
            function_choice_of(value)
        assert caught.value.param in ("function_call", "function_call.name")
