"""Tools and earlier calls as chat templates want them, and for templates without tools: as text in the messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from .conversation import ChoiceMode, Tool, ToolChoice
from .parsing.emitter import CUSTOM_INPUT

NO_PARAMETERS: Final[dict[str, Any]] = {"type": "object", "properties": {}}
_CUSTOM_PARAMETERS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
}


def parameters_of(tool: Tool) -> dict[str, Any]:
    """The schema of the arguments; of a custom tool: an object with one text."""
    if tool.custom:
        return _CUSTOM_PARAMETERS
    return tool.parameters or NO_PARAMETERS


def tool_for_template(tool: Tool) -> dict[str, Any]:
    """A tool in OpenAI's form."""
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters_of(tool)},
    }


def messages_for_template(
    messages: Sequence[Mapping[str, Any]], *, object_arguments: bool
) -> list[dict[str, Any]]:
    """Messages with the arguments of earlier calls as the template wants them; what is no JSON object stays text."""
    return [
        {**message, "tool_calls": [_call_for_template(call, object_arguments) for call in calls]}
        if (calls := message.get("tool_calls"))
        else dict(message)
        for message in messages
    ]


def history_warnings(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Says which earlier calls have arguments that are no JSON object."""
    return [
        f"messages[{index}].tool_calls[{number}].function.arguments: this is no JSON object; it is passed on as it is"
        for index, message in enumerate(messages)
        for number, call in enumerate(message.get("tool_calls") or ())
        if not isinstance(_parsed(_function(call).get("arguments")), dict)
    ]


def generic_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], choice: ToolChoice
) -> list[dict[str, Any]]:
    """Messages for a template without tools: instructions in the system message, calls and results as text.

    If no tools are offered, only calls and results of the history become text.
    """
    result: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for message in messages:
        role, content = message.get("role"), message.get("content") or ""
        if role == "assistant":
            calls = message.get("tool_calls") or ()
            for call in calls:
                names[call.get("id", "")] = _function(call).get("name", "")
            if calls:
                content = json.dumps(
                    {"tool_calls": [_plain_call(call) for call in calls]}, ensure_ascii=False
                )
            elif tools:
                content = json.dumps({"response": content}, ensure_ascii=False)
            result.append({"role": "assistant", "content": content})
        elif role == "tool":
            name = names.get(message.get("tool_call_id", ""), "") or message.get("name", "")
            text = f"Result of {name or 'the tool'}: {content}"
            if result and result[-1].get("role") == "user":  # templates may want roles to alternate
                result[-1] = {**result[-1], "content": f"{result[-1]['content']}\n{text}"}
            else:
                result.append({"role": "user", "content": text})
        elif role == "user" and result and result[-1].get("role") == "user":
            result[-1] = {**result[-1], "content": f"{result[-1]['content']}\n\n{content}"}
        else:
            result.append(dict(message))
    if not tools:
        return result
    instructions = _instructions(tools, choice)
    if result and result[0].get("role") in ("system", "developer"):
        result[0] = {**result[0], "content": f"{result[0]['content']}\n\n{instructions}"}
    else:
        result.insert(0, {"role": "system", "content": instructions})
    return result


def _instructions(tools: Sequence[Tool], choice: ToolChoice) -> str:
    lines = [json.dumps(tool_for_template(tool)["function"], ensure_ascii=False) for tool in tools]
    call = '{"tool_calls": [{"name": "NAME", "arguments": {...}}]}'
    if choice.mode is ChoiceMode.NAMED:
        rule = f"Call the tool {choice.name}. Answer with one JSON object: {call}"
    elif choice.mode is ChoiceMode.REQUIRED:
        rule = f"Call a tool. Answer with one JSON object: {call}"
    else:
        rule = (
            f"To call tools, answer with one JSON object: {call}\n"
            'Otherwise answer with one JSON object: {"response": "your answer"}'
        )
    return "You can call these tools:\n" + "\n".join(lines) + f"\n\n{rule}"


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    return function if isinstance(function, Mapping) else {}


def _parsed(arguments: object) -> object:
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
        json.dumps(parsed, ensure_ascii=False).encode()  # half of a surrogate pair, from a text that was cut
    except (ValueError, RecursionError):
        return None
    return parsed


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = _function(call)
    parsed = _parsed(function.get("arguments"))
    arguments = parsed if isinstance(parsed, dict) else function.get("arguments")
    return {"name": function.get("name"), "arguments": arguments}


def _call_for_template(call: Mapping[str, Any], object_arguments: bool) -> dict[str, Any]:
    function = _function(call)
    arguments = function.get("arguments")
    if object_arguments:
        parsed = _parsed(arguments)
        arguments = parsed if isinstance(parsed, dict) else arguments
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}
