"""Answers with tool calls in the format of each family, for tests of the parser and of the grammars."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from engine.tokenizer_manager.conversation.conversation import ReasoningOptions, Tool
from engine.tokenizer_manager.conversation.deltas import CallArguments, Content, Delta, Reasoning
from engine.tokenizer_manager.conversation.parsing.families import FAMILIES
from engine.tokenizer_manager.conversation.parsing.output_parser import OutputParser
from engine.tokenizer_manager.conversation.parsing.reasoning_families import REASONING_FAMILIES

WEATHER: Final = Tool(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
    strict=True,
)
LOOSE: Final = Tool(
    name="loose", parameters={"type": "object", "properties": {"q": {}, "n": {"type": "integer"}}}
)
NOW: Final = Tool(name="now")
SHELL: Final = Tool(name="shell", custom=True)
TOOLS: Final = (WEATHER, LOOSE, NOW, SHELL)

ARGUMENTS: Final = '{"city": "Par\\"ïs", "days": 3}'
_JSON: Final = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
_NOW: Final = '{"name": "now", "arguments": {}}'
_LLAMA: Final = f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}'

CALLS: Final[dict[str, str]] = {
    "hermes": f"<tool_call>\n{_JSON}\n</tool_call>\n<tool_call>\n{_NOW}\n</tool_call>",
    "qwen3_coder": '<tool_call>\n<function=get_weather>\n<parameter=city>\nPar"ïs\n</parameter>\n<parameter=days>\n3\n'
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "glm45": '<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Par"ïs</arg_value>\n<arg_key>days</arg_key>\n'
    "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    "llama3_json": _LLAMA + '; {"name": "now", "parameters": {}}',
    "pythonic": '[get_weather(city="Par\\"ïs", days=3), now()]',
    "mistral": f"[TOOL_CALLS][{_JSON}, {_NOW}]",
    "mistral_v11": f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    f"{ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGUMENTS}"
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" '
    'string="true">Par"ïs</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    '</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    f"{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Par"ïs</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "granite": f"<|tool_call|>[{_JSON}, {_NOW}]",
    "phi4_mini": f"functools[{_JSON}, {_NOW}]",
    "nemotron": f"<TOOLCALL>[{_JSON}, {_NOW}]</TOOLCALL>",
    "seed_oss": '<seed:tool_call>\n<function=get_weather>\n<parameter=city>Par"ïs</parameter>\n<parameter=days>3'
    "</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" '
    'string="true">Par"ïs</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    '</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    "lfm2": '<|tool_call_start|>[get_weather(city="Par\\"ïs", days=3), now()]<|tool_call_end|>',
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Par"ïs<|"|>,days:3}<tool_call|>'
    "<|tool_call>call:now{}<tool_call|>",
    "command_a": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", '
    f'"parameters": {ARGUMENTS}}},'
    '\n    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
    "apertus": f'<|tools_prefix|>[{{"get_weather": {ARGUMENTS}}}, {{"now": {{}}}}]<|tools_suffix|>',
    "apriel": f"<tool_calls>[{_JSON}, {_NOW}]</tool_calls>",
    "generic": f'{{"tool_calls": [{_JSON}, {_NOW}]}}',
    "harmony": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
    "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
}
"""Two calls: get_weather with `ARGUMENTS`, and now."""


def parse(
    parts: Iterable[str],
    family: str | None,
    *,
    reasoning: str | None = None,
    opened: bool = False,
    options: ReasoningOptions | None = None,
    must_call: bool = False,
    tools: tuple[Tool, ...] = TOOLS,
) -> list[Delta]:
    """The deltas of an answer that arrives in these parts; neighbors of one kind are joined. Ids are id0, id1, ..."""
    parser = OutputParser(
        None if family is None else FAMILIES[family],
        tools,
        reasoning=None if reasoning is None else REASONING_FAMILIES[reasoning],
        opened=opened,
        options=options,
        must_call=must_call,
        make_id=lambda _, call: f"id{call}",
    )
    deltas: list[Delta] = []
    for part in parts:
        deltas += parser.feed(part)
    return joined(deltas + parser.feed("", final=True))


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    result: list[Delta] = []
    for delta in deltas:
        last = result[-1] if result else None
        if (isinstance(delta, Content) and isinstance(last, Content)) or (
            isinstance(delta, Reasoning) and isinstance(last, Reasoning)
        ):
            result[-1] = type(delta)(last.text + delta.text)
        elif isinstance(delta, CallArguments) and isinstance(last, CallArguments):
            result[-1] = CallArguments(delta.call, last.text + delta.text)
        else:
            result.append(delta)
    return result
