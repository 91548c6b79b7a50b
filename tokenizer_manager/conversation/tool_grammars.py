"""`ToolGrammars`: the grammars of tool calls, from the same rows of `families` that the parser reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from ...grammar.lowering.lark import NOTHING, LarkBuilder, embedded, json_rule, one_of, quoted
from ...runtime.grammar_use import GrammarKind, GrammarSpec, Triggered, Whitespace
from .conversation import Tool
from .parameters import CUSTOM_INPUT, NO_PARAMETERS, Parameters, Shape, Unenforceable, parameters_of
from .parsing.families import Form, Pieces, ToolFamily
from .parsing.tagged_calls import MAX_KEY_CHARS, PYTHON_KEY
from .value_grammars import ValueGrammars

MarkerId = Callable[[str], int | None]
"""The id of the special token that a literal is; None if it is text."""

_ANY_OBJECT: Final[dict[str, Any]] = {"type": "object"}
_LEADING_SPACE: Final = r"/\n{0,2}/"
_KEY: Final = r"[A-Za-z0-9_.\-]{1,64}"


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
        self._values = ValueGrammars(family, whitespace, self._literal, self._specials)

    def check(self, tool: Tool) -> None:
        """Check that the format can follow the schema of a strict tool.

        Raises:
            Unenforceable: it cannot.
        """
        if self._family.form in (Form.TAGGED, Form.PYTHONIC):
            self._body(LarkBuilder(), tool)

    def triggered(self) -> tuple[Triggered, ...]:
        """Grammars that begin with the marker of a call in free text."""
        family = self._family
        if family.form is Form.HARMONY:
            builder = LarkBuilder()
            builder.start(one_of(self._harmony_call(builder, tool) for tool in self._tools))
            spec = builder.spec()
            return tuple(Triggered(marker.encode(), spec) for marker in family.call_markers)
        if family.at_start:
            return tuple(each for tool in self._tools for each in self._triggered_by_name(tool))
        trigger, *rest = family.begin
        calls = self._calls(tuple(rest), single=not family.section_begin)
        others = [Triggered(marker.encode(), self._one_call(marker)) for marker in family.also_begins]
        return Triggered(trigger.strip().encode(), calls), *others

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

    def _one_call(self, marker: str) -> GrammarSpec:
        """A call that begins with one of the family's further markers."""
        builder = LarkBuilder()
        call = builder.add_rule("call", one_of(self._body(builder, tool) for tool in self._tools))
        after, end = self._literal(self._family.after(marker)), self._literal(self._family.call_end)
        builder.start(_joined((after, call, end)))
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
                end = _joined((self._arguments(builder, tool), quoted("}")))
                if not family.name_key:
                    return _joined((quoted(f'{{"{tool.name}": '), end))
                if family.id_key:
                    begin = f'", "{family.name_key}": "{tool.name}", "{key}": '
                    number = quoted(f'{{"{family.id_key}": "'), "/[0-9]{1,3}/"
                    return _joined((*number, quoted(begin), end))
                parts = ["{", '"name"', ":", " ", f'"{tool.name}"', ",", " ", f'"{key}"', ":", " "]
                if not family.at_start:
                    parts = ["".join(parts)]
                # A call without a marker may begin like an answer by a schema. The library reads the longest terminal,
                # so both must consist of the same ones.
                return _joined((*map(quoted, parts), end))
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

    # ------------------------------------------------------------ tagged and pythonic

    def _parameters(self, builder: LarkBuilder, tool: Tool) -> str:
        """The parameters: of a strict tool in the order of its schema, otherwise any."""
        family = self._family
        if not tool.strict and not tool.custom:
            names = self._names(tool)
            if tool.parameters is None:
                return ""
            key = f"/{_KEY}/" if not names else one_of(map(quoted, names))
            flag = (
                one_of((quoted(' string="true">'), quoted(' string="false">'))) if family.string_flag else ""
            )
            return f"({self._parameter(builder, key, _joined((flag, self._values.text(builder))))})*"
        alternatives = []
        for parameters, shape in self._shapes(tool):
            if not shape.properties and not shape.required and shape.others is not False:
                value = self._values.tagged(builder, parameters, shape.others)
                alternatives.append(f"({self._parameter(builder, f'/{_KEY}/', value)})*")
                continue
            parts = []
            for key, schema in self._properties(shape):
                value = self._values.tagged(builder, parameters, schema)
                if value:
                    rule = self._parameter(builder, quoted(key), value)
                    parts.append(rule if key in shape.required else f"{rule}?")
            alternatives.append(_joined(parts) or NOTHING)
        return one_of(alternatives)

    def _parameter(self, builder: LarkBuilder, key: str, value: str) -> str:
        begin = self._literal(self._family.parameter_begin)
        middle = self._literal(self._family.parameter_middle)
        return builder.add_rule("parameter", _joined((begin, key, middle, value)))

    def _shapes(self, tool: Tool) -> Iterator[tuple[Parameters, Shape]]:
        parameters = Parameters(arguments_schema(tool))
        if parameters.unenforceable:
            raise Unenforceable(parameters.unenforceable)
        for shape in parameters.shapes:
            yield parameters, shape

    def _names(self, tool: Tool) -> list[str]:
        """The names of the parameters that the format can write."""
        return [name for name in Parameters(parameters_of(tool)).names if self._can_write(name)]

    def _properties(self, shape: Shape) -> Iterator[tuple[str, Any]]:
        """Names and schemas of the parameters, in order; optional ones that cannot be written are left out."""
        for key in dict.fromkeys((*shape.properties, *sorted(shape.required))):
            if self._can_write(key):
                yield key, shape.properties.get(key, shape.others)
            elif key in shape.required:
                raise Unenforceable(f"the name {key[:60]!r} of a required parameter")

    def _can_write(self, key: str) -> bool:
        """Whether the parser reads this name of a parameter back."""
        family = self._family
        if not key or len(key) > MAX_KEY_CHARS or not key.isprintable():
            return False
        if family.form is Form.TAGGED:
            return family.parameter_middle[0].strip() not in key
        if family.quote:
            return ":" not in key and key == key.strip(' "}') and family.quote not in key
        return PYTHON_KEY.fullmatch(key) is not None

    def _python_call(self, builder: LarkBuilder, tool: Tool) -> str:
        begin = f"{self._family.name_prefix}{tool.name}{self._family.syntax[0]}"
        return f"{quoted(begin)} {self._python_arguments(builder, tool)}"

    def _python_arguments(self, builder: LarkBuilder, tool: Tool) -> str:
        """The arguments and the bracket after them: of a strict tool in the order of its schema, otherwise any."""
        _, assign, separator, closing = self._family.syntax
        end = quoted(closing)
        if tool.strict or tool.custom:
            shapes = [
                self._python_shape(builder, parameters, shape) for parameters, shape in self._shapes(tool)
            ]
            return _joined((one_of(shapes), end))
        names = self._names(tool)
        if not names:
            return end
        value = self._values.any_value(builder)
        argument = builder.add_rule("argument", f"{one_of(map(quoted, names))} {quoted(assign)} {value}")
        return f"({argument} ({quoted(separator)} {argument})*)? {end}"

    def _python_shape(self, builder: LarkBuilder, parameters: Parameters, shape: Shape) -> str:
        """Arguments in order. From the last one on: what may come after a first argument, and what may come at all."""
        _, assign, separator, _ = self._family.syntax
        rest, whole = NOTHING, NOTHING
        for key, schema in reversed(list(self._properties(shape))):
            value = self._values.pythonic(builder, parameters, schema)
            if not value:
                continue
            argument = builder.add_rule("argument", f"{quoted(key + assign)} {value}")
            more = f"{quoted(separator)} {argument}"
            is_required = key in shape.required
            first = f"{argument} {rest}"
            whole = builder.add_rule("arguments", first if is_required else one_of((first, whole)))
            rest = builder.add_rule("arguments", f"{more if is_required else f'({more})?'} {rest}")
        return whole

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
