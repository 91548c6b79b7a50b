from __future__ import annotations

from typing import Any

import pytest

from engine.runtime.errors import RequestError
from engine.tokenizer_manager.conversation.conversation import ChoiceMode, Tool, ToolChoice
from engine.tokenizer_manager.conversation.tools import checked_tools

NOW = Tool(name="now")
DEEP: dict[str, Any] = {}
for _ in range(30_000):
    DEEP = {"properties": DEEP}


@pytest.mark.parametrize(
    ("tools", "choice", "param", "message"),
    [
        ([Tool(name="")], {}, "tools[0].name", "must match"),
        ([NOW, Tool(name="a b")], {}, "tools[1].name", "must match"),
        ([Tool(name="x" * 129)], {}, "tools[0].name", "must match"),
        ([Tool(name="<tool_call>")], {}, "tools[0].name", "must match"),
        ([NOW, NOW], {}, "tools[1].name", r"tools\[1\].name is 'now', which is the name of tools\[0\], too"),
        (
            [Tool(name=f"t{index}") for index in range(513)],
            {},
            "tools",
            "tools has 513 tools, the limit is 512",
        ),
        (
            [Tool(name="x", parameters={"type": "array"})],
            {},
            "tools[0].parameters",
            "arguments are an object",
        ),
        (
            [Tool(name="x", parameters={"type": ["object"]})],
            {},
            "tools[0].parameters",
            "arguments are an object",
        ),
        (
            [Tool(name="x", parameters={"anyOf": [{"type": "object"}, {"type": "null"}]}, strict=True)],
            {},
            "tools[0].parameters",
            r'parameters/anyOf/1: type is "null", but arguments are an object; .*leave this branch out',
        ),
        (
            [Tool(name="x", parameters={"properties": []})],
            {},
            "tools[0].parameters",
            "properties: expected an object",
        ),
        (
            [Tool(name="x", parameters={"required": "a"})],
            {},
            "tools[0].parameters",
            "required: expected a list",
        ),
        ([Tool(name="x", parameters=DEEP)], {}, "tools[0].parameters", "nested too deeply"),
        ([Tool(name="x", description="y" * (300 << 10))], {}, "tools", "raise --max-schema-kb"),
        ([], {"mode": ChoiceMode.REQUIRED}, "tool_choice", "tools is empty"),
        ([], {"mode": ChoiceMode.NAMED, "name": "now"}, "tool_choice", "tools is empty"),
        ([NOW], {"mode": ChoiceMode.NAMED, "name": "other"}, "tool_choice", "'other', which is not in tools"),
        ([NOW], {"allowed": ("now", "other")}, "tool_choice", "'other', which is not in tools"),
        ([NOW], {"allowed": (), "mode": ChoiceMode.REQUIRED}, "tool_choice", "allows no tool"),
    ],
)
def test_tools_that_are_refused(tools: list[Tool], choice: dict[str, Any], param: str, message: str):
    with pytest.raises(RequestError, match=message) as caught:
        checked_tools(tools, ToolChoice(**choice), at="tools", max_tools=512, max_schema_kb=256)

    assert caught.value.status == 400
    assert caught.value.param == param


def test_tools_that_are_taken():
    tools = [
        NOW,
        Tool(name="a.b:c-D_9", parameters={"type": "object", "properties": {}}),
        Tool(name="x", parameters={}),
        Tool(
            name="u", parameters={"oneOf": [{"required": ["a"]}, {"type": ["object", "null"]}]}, strict=True
        ),
        Tool(name="v", parameters={"anyOf": [{"type": "object"}, {"type": "null"}]}),
        Tool(name="shell", custom=True),
        *(Tool(name=f"t{index}") for index in range(506)),
    ]

    assert checked_tools(tools, ToolChoice(mode=ChoiceMode.NAMED, name="x"), at="tools") == []
    assert checked_tools([], ToolChoice(mode=ChoiceMode.NONE), at="tools") == []
