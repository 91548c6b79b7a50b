"""Tools of a chat: refused where no answer can follow them, and written as the chat template wants them.

For templates without tools, tools and earlier calls are text in the messages; for those that show tools and nothing of
calls, `written_calls` are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ...runtime.errors import RequestError
from .conversation import ChoiceMode, Tool, ToolChoice, joined_contents
from .parameters import branches_of, parameters_of
from .parsing.families import Form, ToolFamily

_NAME: Final = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")


def checked_tools(
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    at: str = "tools",
    choice_at: str = "tool_choice",
    schema_field: str = "parameters",
    max_tools: int = 512,
    max_schema_kb: int = 256,
) -> list[str]:
    """Check the tools of a request; warnings for the client.

    Args:
        tools: of the request.
        choice: of them.
        at: the field that has the tools, or with {} the field of one tool, for errors.
        choice_at: the field that has the choice.
        schema_field: the field of a tool that has its schema.
        max_tools: `--max-tools`.
        max_schema_kb: `--max-schema-kb`: of all tools together.

    Raises:
        RequestError: a rule is violated; `param` says where.
    """
    path = at if "{}" in at else f"{at}[{{}}]"
    at = path.partition("[")[0]
    if len(tools) > max_tools:
        raise _refused(f"{at} has {len(tools):,} tools, the limit is {max_tools:,}; send fewer", at)
    seen: dict[str, int] = {}
    num_bytes = 0
    for index, tool in enumerate(tools):
        place = path.format(index)
        if not _NAME.fullmatch(tool.name):
            raise _refused(
                f"{place}.name is {tool.name[:160]!r}, but it must match [A-Za-z0-9_.:-]{{1,128}}",
                f"{place}.name",
            )
        if tool.name in seen:
            raise _refused(
                f"{place}.name is {tool.name!r}, which is the name of {path.format(seen[tool.name])}, too; names must "
                f"be unique",
                f"{place}.name",
            )
        seen[tool.name] = index
        num_bytes += len(tool.description.encode("utf-8", "replace"))
        num_bytes += _checked_parameters(tool, f"{place}.{schema_field}")
        if num_bytes > max_schema_kb << 10:
            raise RequestError(
                f"the tools up to {place} have {num_bytes:,} bytes, the limit is {max_schema_kb:,} kB; shorten their "
                f"descriptions and schemas, or raise --max-schema-kb",
                param=at,
                code="schema_too_complex",
            )
    _check_choice(seen, choice, at, choice_at)
    return []


def _checked_parameters(tool: Tool, place: str) -> int:
    """Check that the parameters are a schema of an object; their size in bytes."""
    schema = tool.parameters
    if schema is None:
        return 0
    kind = schema.get("type", "object")
    if kind != "object":
        raise RequestError(
            f'{place}: type is {json.dumps(kind)[:80]}, but arguments are an object; use "type": "object"',
            param=place,
            code="invalid_schema",
        )
    for keyword in ("anyOf", "oneOf") if tool.strict else ():
        for index, branch in enumerate(branches_of(schema, keyword)):
            kinds = branch.get("type", "object") if isinstance(branch, dict) else "object"
            if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
                raise RequestError(
                    f"{place}/{keyword}/{index}: type is {json.dumps(kinds)[:80]}, but arguments are an object; use "
                    f'"type": "object", or leave this branch out',
                    param=place,
                    code="invalid_schema",
                )
    for key, wanted in (("properties", dict), ("required", list)):
        if key in schema and not isinstance(schema[key], wanted):
            raise RequestError(
                f"{place}/{key}: expected {'an object' if wanted is dict else 'a list'}",
                param=place,
                code="invalid_schema",
            )
    try:
        return len(json.dumps(schema))
    except (RecursionError, ValueError):
        raise RequestError(
            f"{place}: the schema is nested too deeply", param=place, code="schema_too_complex"
        ) from None


def _check_choice(names: dict[str, int], choice: ToolChoice, at: str, choice_at: str) -> None:
    if choice.mode in (ChoiceMode.REQUIRED, ChoiceMode.NAMED) and not names:
        raise _refused(f"{choice_at} requires a call, but {at} is empty; send tools", choice_at)
    if choice.mode is ChoiceMode.NAMED and choice.name not in names:
        raise _refused(f"{choice_at} names the tool {choice.name[:160]!r}, which is not in {at}", choice_at)
    for name in choice.allowed or ():
        if name not in names:
            raise _refused(f"{choice_at} allows the tool {name[:160]!r}, which is not in {at}", choice_at)
    if choice.allowed is not None and not choice.allowed and choice.mode is ChoiceMode.REQUIRED:
        raise _refused(f"{choice_at} requires a call, but allows no tool", choice_at)


def _refused(message: str, param: str) -> RequestError:
    return RequestError(message, param=param, code="invalid_tools")


def tool_for_template(tool: Tool) -> dict[str, Any]:
    """A tool in OpenAI's form."""
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters_of(tool)},
    }


def messages_for_template(
    messages: Sequence[Mapping[str, Any]], *, object_arguments: bool, written: ToolFamily | None = None
) -> list[dict[str, Any]]:
    """Messages with earlier calls as the template wants them; arguments that are no JSON object stay text.

    Args:
        messages: of the conversation.
        object_arguments: the template wants objects, otherwise JSON texts.
        written: write the calls into the contents in this format.
    """
    result = []
    for message in messages:
        changed, calls = dict(message), message.get("tool_calls")
        if calls and written is not None:
            functions = [_plain_call(call) for call in calls]
            named = [
                (str(each["name"]), each["arguments"] if isinstance(each["arguments"], dict) else {})
                for each in functions
            ]
            texts = [text for text in (message.get("content"), written_calls(written, named)) if text]
            changed["content"] = "\n".join(texts)
            del changed["tool_calls"]
        elif calls:
            changed["tool_calls"] = [_call_for_template(call, object_arguments) for call in calls]
        result.append(changed)
    return result


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
                written = {"tool_calls": [_plain_call(call) for call in calls]}
                texts = (content, json.dumps(written, ensure_ascii=False))
                content = "\n".join(text for text in texts if text)
            elif tools:
                content = json.dumps({"response": content}, ensure_ascii=False)
            result.append({"role": "assistant", "content": content})
        elif role == "tool":
            name = names.get(message.get("tool_call_id", ""), "") or message.get("name", "")
            text = f"Result of {name or 'the tool'}: {content}"
            if result and result[-1].get("role") == "user":  # templates may want roles to alternate
                result[-1] = {**result[-1], "content": joined_contents(result[-1]["content"], text, "\n")}
            else:
                result.append({"role": "user", "content": text})
        elif role == "user" and result and result[-1].get("role") == "user":
            result[-1] = {**result[-1], "content": joined_contents(result[-1]["content"], content, "\n\n")}
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
            # No words in quotes: a small model answers with them.
            'Otherwise answer with one JSON object: {"response": TEXT}, where TEXT is your answer to the user as a '
            "string"
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


def written_calls(family: ToolFamily, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The text of calls, of which each is a name and arguments; the parser reads it back. Not for whole answers."""
    texts = []
    for index, (name, arguments) in enumerate(calls):
        body = _body(family, index, name, arguments)
        texts.append("".join((*family.call_begin, body, *family.call_end)))
    return "".join((*family.section_begin, "".join(family.separator).join(texts), *family.section_end))


def _body(family: ToolFamily, index: int, name: str, arguments: Mapping[str, Any]) -> str:
    full_name = f"{family.name_prefix}{name}{f':{index}' if family.indexed_name else ''}"
    match family.form:
        case Form.JSON if not family.name_key:
            return _json({name: arguments})
        case Form.JSON:
            number = {family.id_key: str(index)} if family.id_key else {}
            return _json({**number, family.name_key: name, family.arguments_keys[0]: arguments})
        case Form.NAMED:
            return "".join((full_name, *family.arguments_begin, _json(arguments)))
        case Form.TAGGED:
            parts = [full_name, *family.arguments_begin]
            for key, value in arguments.items():
                flag = f' string="{str(isinstance(value, str)).lower()}">' if family.string_flag else ""
                text = value if isinstance(value, str) else _json(value)
                parts += [*family.parameter_begin, key, *family.parameter_middle, flag, text]
                parts += family.parameter_end
            return "".join(parts)
        case _:
            opening, assign, separator, closing = family.syntax
            members = (f"{key}{assign}{_quoted(family, value)}" for key, value in arguments.items())
            return f"{full_name}{opening}{separator.join(members)}{closing}"


def _quoted(family: ToolFamily, value: Any) -> str:
    """A value of a pythonic call."""
    if not family.quote:
        return repr(value) if value is None or isinstance(value, bool) else _json(value)
    if isinstance(value, str):
        return f"{family.quote}{value}{family.quote}"
    if isinstance(value, list):
        return f"[{','.join(_quoted(family, item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_quoted(family, item)}' for key, item in value.items())}}}"
    return _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
