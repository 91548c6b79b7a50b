"""Each grammar is compiled by llguidance, with the 256 bytes as vocabulary, and reads what the parser reads."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from engine.runtime.grammar_use import GrammarKind, GrammarSpec, Whitespace
from engine.tokenizer_manager.conversation.conversation import Tool
from engine.tokenizer_manager.conversation.parsing.families import FAMILIES
from engine.tokenizer_manager.conversation.tool_grammars import (
    ToolGrammars,
    arguments_schema,
    generic_grammar,
)
from tests.tokenizer_manager.conversation.parsing.answers import CALLS, LOOSE, NOW, TOOLS, WEATHER

BYTES = LLTokenizer("byte")
NATIVE = sorted(set(CALLS) - {"generic", "harmony"})
ANSWER = GrammarSpec(
    GrammarKind.JSON_SCHEMA, '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
)


def matches(spec: GrammarSpec, text: str) -> bool:
    """Whether the text is a whole answer."""
    matcher = LLMatcher(BYTES, spec.text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def ends_after(spec: GrammarSpec, text: str) -> bool:
    """Whether the text is a whole answer, and nothing may follow it."""
    matcher = LLMatcher(BYTES, spec.text, log_level=0)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_stopped()


def grammars(family: str, *tools: Tool, parallel: bool = True) -> ToolGrammars:
    return ToolGrammars(
        FAMILIES[family],
        tools or TOOLS,
        parallel=parallel,
        whitespace=Whitespace.PRETTY,
        marker_id=lambda _: None,
    )


def first_call(family: str) -> str:
    """The answer with only its first call."""
    row = FAMILIES[family]
    text = CALLS[family]
    if row.form.name == "PYTHONIC" and not row.call_begin:
        return text.replace(", now()", "")
    second = text.index("now")
    begin = text.rindex("".join(row.call_begin) or "{", 0, second)
    return text[:begin].removesuffix("".join(row.separator)) + "".join(row.section_end)


@pytest.mark.parametrize("family", NATIVE)
def test_required_calls_are_what_the_parser_reads(family: str):
    spec = grammars(family).required(leading_space=False)

    assert matches(spec, CALLS[family])
    assert not matches(spec, "")
    assert not matches(spec, "I cannot")
    assert not matches(spec, CALLS[family].replace("get_weather", "other"))
    assert not matches(spec, CALLS[family].replace("city", "town"))
    assert matches(grammars(family).required(leading_space=True), f"\n\n{CALLS[family]}")


@pytest.mark.parametrize("family", NATIVE)
def test_one_call_if_calls_are_not_parallel(family: str):
    spec = grammars(family, parallel=False).required(leading_space=False)

    assert matches(spec, first_call(family))
    assert not matches(spec, CALLS[family])


@pytest.mark.parametrize("family", NATIVE)
def test_a_call_that_has_begun_is_a_call_that_parses(family: str):
    text = first_call(family)
    found = sorted(
        (text.index(trigger), len(trigger), number)
        for number, each in enumerate(grammars(family).triggered())
        if (trigger := each.trigger.decode()) in text
    )

    assert [place for place, _, _ in found].count(found[0][0]) == 1
    triggered, rest = grammars(family).triggered()[found[0][2]], text[sum(found[0][:2]) :]
    assert matches(triggered.spec, rest)
    # If the grammar could go on, free text would never follow.
    assert ends_after(triggered.spec, rest) or ends_after(triggered.spec, rest + "\n")


@pytest.mark.parametrize("family", [name for name in NATIVE if FAMILIES[name].also_begins])
def test_a_call_without_its_first_marker_is_constrained_too(family: str):
    row = FAMILIES[family]
    if row.at_start:
        return
    text, [marker] = first_call(family), row.also_begins
    if marker not in text:  # another spelling of the first piece
        text = text.replace(row.begin[0].strip(), marker, 1)
    [triggered] = [each for each in grammars(family).triggered() if each.trigger.decode() == marker]
    rest = text.partition(marker)[2].removesuffix("".join(row.section_end))
    assert matches(triggered.spec, rest)
    assert not matches(triggered.spec, rest.replace("city", "town"))


@pytest.mark.parametrize("family", NATIVE)
def test_strict_arguments_follow_the_schema_and_others_are_any(family: str):
    def is_allowed(tool: Tool) -> bool:
        return matches(grammars(family, tool).required(leading_space=False), first_call(family))

    assert is_allowed(WEATHER)
    schema = {"type": "object", "properties": {"city": {"type": "integer"}}, "required": ["city"]}
    assert not is_allowed(Tool(name="get_weather", parameters=schema, strict=True))
    assert is_allowed(Tool(name="get_weather", parameters=WEATHER.parameters))
    assert not is_allowed(NOW)


@pytest.mark.parametrize("family", sorted(CALLS))
def test_special_tokens_are_ids(family: str):
    if family == "generic":
        return
    row = FAMILIES[family]
    made = ToolGrammars(
        row,
        TOOLS,
        parallel=True,
        whitespace=Whitespace.PRETTY,
        marker_id=lambda text: 7 if text.startswith("<") else None,
    )
    specs = [made.required(leading_space=False), *(each.spec for each in made.triggered())]

    assert all(
        ("<[7]>" in spec.text) == any(piece.startswith("<") for piece in row.markers) for spec in specs[:1]
    ) or (row.at_start)
    assert "suffix=" not in specs[0].text  # a text ends at the token
    for spec in specs:
        is_error, messages = LLMatcher.validate_grammar_with_warnings(spec.text)
        assert not is_error, messages


def test_harmony_calls():
    made = grammars("harmony")
    call = 'get_weather <|constrain|>json<|message|>{"city": "x"}'

    assert all(ends_after(each.spec, call) for each in made.triggered())
    spec = made.required(leading_space=False, answer=ANSWER)
    for begin in ("", "<|start|>assistant"):
        assert matches(spec, f"{begin}<|channel|>commentary to=functions.{call}")
        assert matches(spec, f'{begin}<|channel|>final<|message|>{{"a": 1}}')


@pytest.mark.parametrize("family", NATIVE)
def test_auto_with_a_schema_is_a_call_or_an_answer_that_fits(family: str):
    spec = grammars(family).required(leading_space=False, answer=ANSWER)

    assert matches(spec, CALLS[family])
    assert matches(spec, '{"a": 1}')
    assert not matches(spec, '{"a": "x"}')
    assert not matches(spec, "text")


def test_the_generic_format():
    def generic(
        *, must_call: bool = False, parallel: bool = True, answer: GrammarSpec | None = None
    ) -> GrammarSpec:
        return generic_grammar(
            TOOLS, must_call=must_call, parallel=parallel, whitespace=Whitespace.PRETTY, answer=answer
        )

    text = '{"response": "say \\"hi\\"\\n"}'
    assert matches(generic(), CALLS["generic"])
    assert matches(generic(), text)
    assert not matches(generic(must_call=True), text)
    assert not matches(generic(parallel=False), CALLS["generic"])
    assert not matches(generic(), '{"tool_calls": []}')
    assert not matches(generic(), "text")
    assert matches(generic(answer=ANSWER), '{"response": {"a": 1}}')
    assert not matches(generic(answer=ANSWER), text)
    assert matches(generic(answer=GrammarSpec(GrammarKind.REGEX, "yes|no")), "yes")
    lark = GrammarSpec(GrammarKind.LARK, 'start: call\ncall: "a" "b"\n')  # names of its rules are its own
    assert matches(generic(answer=lark), "ab")


def test_schemas_of_arguments():
    empty = {"type": "object", "properties": {}, "additionalProperties": False}
    assert arguments_schema(NOW) == empty
    assert arguments_schema(LOOSE) == {"type": "object"}
    assert arguments_schema(WEATHER) == WEATHER.parameters
    pattern = Tool(name="x", custom=True, custom_grammar=GrammarSpec(GrammarKind.REGEX, "a|b"))
    assert arguments_schema(pattern)["properties"] == {"input": {"type": "string", "pattern": "^(?:a|b)$"}}
    spec = grammars("hermes", pattern).required(leading_space=False)
    assert matches(spec, '<tool_call>\n{"name": "x", "arguments": {"input": "b"}}\n</tool_call>')
    assert not matches(spec, '<tool_call>\n{"name": "x", "arguments": {"input": "c"}}\n</tool_call>')


@pytest.mark.parametrize("family", ["qwen3_coder", "glm45", "minimax_m2", "deepseek_v32"])
def test_tagged_parameters_have_enums_references_and_text_with_newlines(family: str):
    schema = {
        "type": "object",
        "$defs": {"n": {"type": "integer", "minimum": 3}},
        "properties": {
            "unit": {"type": "string", "enum": ["c", "f"]},
            "n": {"$ref": "#/$defs/n"},
            "text": {"type": "string"},
        },
        "required": ["unit", "text"],
    }
    row = FAMILIES[family]

    def answer(**values: str) -> str:
        parts = [*row.section_begin, *row.call_begin, "f", *row.arguments_begin]
        for key, value in values.items():
            flag = f' string="{"false" if key == "n" else "true"}">' if row.string_flag else ""
            parts += [*row.parameter_begin, key, *row.parameter_middle, flag, value, *row.parameter_end]
        return "".join([*parts, *row.call_end, *row.section_end])

    spec = grammars(family, Tool(name="f", parameters=schema, strict=True)).required(leading_space=False)
    assert matches(spec, answer(unit="c", n="3", text="a\n</b>\n"))
    assert matches(spec, answer(unit="f", text=""))
    assert not matches(spec, answer(unit="k", text="a"))
    assert not matches(spec, answer(unit="c", n="2", text="a"))
    assert not matches(spec, answer(unit="c"))


def test_names_that_look_like_markers_or_rules_are_quoted():
    """Tools named like markers, and like rules of the grammar."""
    tools = [Tool(name=name) for name in ("start", "call", "tool_call", "a.b:c-d")]
    for family in NATIVE:
        spec = grammars(family, *tools).required(leading_space=False)
        assert not LLMatcher.validate_grammar_with_warnings(spec.text)[0]


def test_512_tools_are_one_grammar():
    tools = [
        Tool(name=f"t{index}", parameters=json.loads(json.dumps(WEATHER.parameters))) for index in range(512)
    ]
    triggered = grammars("hermes", *tools).triggered()

    assert len(triggered) == 1
    assert matches(triggered[0].spec, '\n{"name": "t511", "arguments": {"x": 1}}\n</tool_call>')
