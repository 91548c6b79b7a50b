"""`ToolGrammars`: the grammars of tool calls, from the same rows of `families` that the parser reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from ...grammar.lowering.lark import LarkBuilder, embedded, json_rule, one_of, quoted, regex
from ...runtime.grammar_use import GrammarKind, GrammarSpec, Triggered, Whitespace
from .conversation import Tool
from .parsing.emitter import CUSTOM_INPUT
from .parsing.families import Form, Pieces, ToolFamily
from .tools import NO_PARAMETERS, parameters_of

MarkerId = Callable[[str], int | None]
"""The id of the special token that a literal is; None if it is text."""

_ANY_OBJECT: Final[dict[str, Any]] = {"type": "object"}
_LEADING_SPACE: Final = r"/\n{0,2}/"
_KEY: Final = r"[A-Za-z0-9_.\-]{1,64}"
_PYTHON_VALUE: Final = (
    r"\"([^\"\\\n]|\\.)*\"|'([^'\\\n]|\\.)*'|-?[0-9]+(\.[0-9]+)?|True|False|None|\[[^\[\]\n]*\]|\{[^{}\n]*\}"
)


class ToolGrammars:
    """Makes the grammars of one request."""

    def __init__(
        self,
        family: ToolFamily,
        tools: Sequence[Tool],
        *,
        parallel: bool,
        whitespace: Whitespace,
        marker_id: MarkerId,
    ) -> None:
        """Prepare.

        Args:
            family: the format of the calls; not generic.
            tools: that may be called, at least one.
            parallel: an answer may have several calls.
            whitespace: in JSON.
            marker_id: which literals are special tokens.
        """
        self._family = family
        self._tools = tools
        self._parallel = parallel
        self._whitespace = whitespace
        self._marker_id = marker_id
        specials = [piece.strip() for piece in family.markers if marker_id(piece.strip()) is not None]
        self._specials = (
            re.compile("|".join(map(re.escape, sorted(set(specials), key=len, reverse=True))))
            if specials
            else None
        )

    def triggered(self) -> tuple[Triggered, ...]:
        """Grammars that begin with the marker of a call in free text."""
        family = self._family
        if family.form is Form.HARMONY:
            builder = LarkBuilder()
            builder.start(one_of(self._harmony_call(builder, tool) for tool in self._tools))
            spec = builder.spec()
            markers = ("<|channel|>commentary to=functions.", "<|start|>assistant to=functions.")
            return tuple(Triggered(marker.encode(), spec) for marker in markers)
        if family.at_start:
            return tuple(each for tool in self._tools for each in self._triggered_by_name(tool))
        trigger, *rest = family.begin
        return (
            Triggered(trigger.strip().encode(), self._calls(tuple(rest), single=not family.section_begin)),
        )

    def required(self, *, leading_space: bool, answer: GrammarSpec | None = None) -> GrammarSpec:
        """The whole answer is calls.

        Args:
            leading_space: the answer follows a reasoning block, after which models write newlines.
            answer: what the answer may be instead.
        """
        if self._family.form is Form.HARMONY:
            return self._harmony_answer(answer)
        builder = LarkBuilder()
        calls = self._calls_rule(builder, self._family.begin, single=False)
        body = calls if answer is None else one_of((calls, builder.add_rule("answer", embedded(answer))))
        builder.start(f"{_LEADING_SPACE} {body}" if leading_space else body)
        return builder.spec()

    # ------------------------------------------------------------ calls

    def _calls(self, begin: Pieces, *, single: bool) -> GrammarSpec:
        builder = LarkBuilder()
        builder.start(self._calls_rule(builder, begin, single=single))
        return builder.spec()

    def _calls_rule(self, builder: LarkBuilder, begin: Pieces, *, single: bool) -> str:
        """Calls, the first of which begins with `begin`."""
        family = self._family
        call = builder.add_rule("call", one_of(self._body(builder, tool) for tool in self._tools))
        parts = [self._literal(begin)]
        if family.section_begin:
            parts.append(self._literal(family.call_begin))
        parts += [call, self._literal(family.call_end)]
        if self._parallel and not single:
            following = (self._literal(family.separator), self._literal(family.call_begin), call)
            parts.append(f"({_joined((*following, self._literal(family.call_end)))})*")
        parts.append(self._literal(family.section_end))
        return _joined(parts) or call

    def _body(self, builder: LarkBuilder, tool: Tool) -> str:
        family = self._family
        match family.form:
            case Form.JSON:
                key = family.arguments_keys[0]
                parts = ["{", '"name"', ":", " ", f'"{tool.name}"', ",", " ", f'"{key}"', ":", " "]
                if not family.at_start:
                    parts = ["".join(parts)]
                # A call without a marker may begin like an answer by a schema. The library reads the longest terminal,
                # so both must consist of the same ones.
                return _joined((*map(quoted, parts), self._arguments(builder, tool), quoted("}")))
            case Form.NAMED:
                name = family.name_prefix + tool.name
                index = r"/:[0-9]{1,3}/" if family.indexed_name else ""
                begin = self._literal(family.arguments_begin)
                return _joined((quoted(name), index, begin, self._arguments(builder, tool)))
            case Form.TAGGED:
                return _joined(
                    (
                        quoted(tool.name),
                        self._literal(family.arguments_begin),
                        self._parameters(builder, tool),
                    )
                )
            case _:
                return self._python_call(builder, tool)

    def _arguments(self, builder: LarkBuilder, tool: Tool) -> str:
        return builder.add_rule("arguments", json_rule(arguments_schema(tool), self._whitespace))

    def _triggered_by_name(self, tool: Tool) -> list[Triggered]:
        """Triggers of a family without markers: the beginning of a call up to the arguments."""
        family = self._family
        builder = LarkBuilder()
        if family.form is Form.PYTHONIC:
            rest = self._python_arguments(builder, tool)
            following = one_of(self._python_call(builder, each) for each in self._tools)
            more = f'(", " {following})*' if self._parallel else ""
            builder.start(_joined((rest, more, quoted("]"))))
            return [Triggered(f"[{tool.name}(".encode(), builder.spec())]
        builder.start(f"{self._arguments(builder, tool)} {quoted('}')}")
        spec = builder.spec()
        return [
            Triggered(f'{{"name": "{tool.name}", "{key}": '.encode(), spec) for key in family.arguments_keys
        ]

    # ------------------------------------------------------------ tagged

    def _parameters(self, builder: LarkBuilder, tool: Tool) -> str:
        """The parameters: of a strict tool in the order of its schema, otherwise any."""
        family = self._family
        schema = parameters_of(tool)
        properties = schema.get("properties") or {}
        if not tool.strict and not tool.custom:
            end = "".join(family.parameter_end)
            if tool.parameters is None:
                return ""
            key = f"/{_KEY}/" if not properties else one_of(map(quoted, properties))
            flag = (
                one_of((quoted(' string="true">'), quoted(' string="false">'))) if family.string_flag else ""
            )
            value = self._text_until(builder, end)
            parameter = _joined(
                (
                    self._literal(family.parameter_begin),
                    key,
                    self._literal(family.parameter_middle),
                    flag,
                    value,
                )
            )
            return f"({builder.add_rule('parameter', parameter)})*"
        required = schema.get("required") or ()
        parts = []
        for key, property_schema in properties.items():
            begin = (
                self._literal(family.parameter_begin),
                quoted(key),
                self._literal(family.parameter_middle),
            )
            rule = builder.add_rule(
                "parameter", _joined((*begin, self._typed_value(builder, property_schema, schema)))
            )
            parts.append(rule if key in required else f"{rule}?")
        return _joined(parts)

    def _typed_value(self, builder: LarkBuilder, schema: Any, whole: dict[str, Any]) -> str:
        family = self._family
        end = "".join(family.parameter_end)
        is_string = isinstance(schema, dict) and schema.get("type") == "string"
        flag = quoted(f' string="{str(is_string).lower()}">') if family.string_flag else ""
        values = schema.get("enum") if isinstance(schema, dict) else None
        if is_string and isinstance(values, list) and all(isinstance(value, str) for value in values):
            return _joined((flag, one_of(map(quoted, values)), self._literal((end,))))
        if is_string:
            return _joined((flag, self._text_until(builder, end)))
        definitions = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
        if isinstance(schema, dict):
            schema = {**definitions, **schema}
        value = builder.add_rule("value", json_rule(schema, self._whitespace))
        return _joined((flag, value, self._literal((end,))))

    def _text_until(self, builder: LarkBuilder, end: str) -> str:
        """Any text up to `end`, the whitespace in front of which belongs to the text."""
        marker = end.strip()
        after = end.partition(marker)[2]
        special = self._specials.search(marker) if self._specials else None
        if special is not None:  # never a part of the text
            before = re.escape(marker[: special.start()])
            text = builder.add_rule("text", regex(f"(.|\\n)*{before}"))
            return _joined((text, self._literal((marker[special.start() :], after))))
        text = builder.add_rule("text", f"%lark {{\nstart[suffix={quoted(marker)}]: /(.|\\n)*/\n}}")
        return _joined((text, quoted(after) if after else ""))

    # ------------------------------------------------------------ pythonic

    def _python_call(self, builder: LarkBuilder, tool: Tool) -> str:
        return f"{quoted(tool.name + '(')} {self._python_arguments(builder, tool)}"

    def _python_arguments(self, builder: LarkBuilder, tool: Tool) -> str:
        properties = parameters_of(tool).get("properties") or {}
        if not properties:
            return quoted(")")
        value = builder.add_terminal("python_value", f"/{_PYTHON_VALUE}/")
        argument = builder.add_rule("argument", f'{one_of(map(quoted, properties))} "=" {value}')
        return f'({argument} (", " {argument})*)? ")"'

    # ------------------------------------------------------------ harmony

    def _harmony_call(self, builder: LarkBuilder, tool: Tool) -> str:
        """A call after `to=functions.`."""
        head = self._literal((f"{tool.name} ", "<|constrain|>", "json", "<|message|>"))
        return f"{head} {self._arguments(builder, tool)}"  # <|call|> is an EOS token

    def _harmony_answer(self, answer: GrammarSpec | None) -> GrammarSpec:
        builder = LarkBuilder()
        calls = one_of(self._harmony_call(builder, tool) for tool in self._tools)
        body = f"{self._literal(('<|channel|>', 'commentary to=functions.'))} {calls}"
        if answer is not None:
            head = self._literal(("<|channel|>", "final", "<|message|>"))
            body = one_of((body, f"{head} {builder.add_rule('answer', embedded(answer))}"))
        builder.start(f"({self._literal(('<|start|>', 'assistant'))})? {body}")
        return builder.spec()

    def _literal(self, pieces: Pieces) -> str:
        """Literals as texts and special tokens."""
        text = "".join(pieces)
        parts, pos = [], 0
        for match in self._specials.finditer(text) if self._specials else ():
            if match.start() > pos:
                parts.append(quoted(text[pos : match.start()]))
            parts.append(f"<[{self._marker_id(match[0])}]>")
            pos = match.end()
        if pos < len(text):
            parts.append(quoted(text[pos:]))
        return " ".join(parts)


def generic_grammar(
    tools: Sequence[Tool],
    *,
    must_call: bool,
    parallel: bool,
    whitespace: Whitespace,
    answer: GrammarSpec | None,
    leading_space: bool = False,
) -> GrammarSpec:
    """The whole answer of the generic format.

    Args:
        tools: that may be called.
        must_call: there is no alternative to a call.
        parallel: several calls may be in the list.
        whitespace: in JSON.
        answer: of the response; None: a text.
        leading_space: as for `ToolGrammars.required`.
    """
    builder = LarkBuilder()
    calls = []
    for tool in tools:
        arguments = builder.add_rule("arguments", json_rule(arguments_schema(tool), whitespace))
        calls.append(_joined((quoted(f'{{"name": "{tool.name}", "arguments": '), arguments, quoted("}"))))
    alternatives = []
    if calls:
        call = builder.add_rule("call", one_of(calls))
        more = f'(", " {call})*' if parallel else ""
        alternatives.append(_joined((quoted('{"tool_calls": ['), call, more, quoted("]}"))))
    if not must_call:
        body = json_rule({"type": "string"}, whitespace) if answer is None else embedded(answer)
        response = builder.add_rule("response", body)
        if answer is None or answer.kind is GrammarKind.JSON_SCHEMA:
            response = _joined((quoted('{"response": '), response, quoted("}")))
        alternatives.append(response)
    body = one_of(alternatives)
    builder.start(f"{_LEADING_SPACE} {body}" if leading_space else body)
    return builder.spec()


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema that the arguments are constrained to."""
    if tool.custom:
        text: dict[str, Any] = {"type": "string"}
        if tool.custom_grammar is not None and tool.custom_grammar.kind is GrammarKind.REGEX:
            text["pattern"] = f"^(?:{tool.custom_grammar.text})$"
        return {**parameters_of(tool), "properties": {CUSTOM_INPUT: text}, "additionalProperties": False}
    if tool.parameters is None or tool.parameters == NO_PARAMETERS:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {**tool.parameters, "type": "object"} if tool.strict else _ANY_OBJECT


def _joined(parts: Sequence[str]) -> str:
    return " ".join(part for part in parts if part)
