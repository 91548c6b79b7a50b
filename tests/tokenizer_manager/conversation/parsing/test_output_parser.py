from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.tokenizer_manager.conversation.conversation import ReasoningOptions, Tool
from engine.tokenizer_manager.conversation.deltas import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Delta,
    Reasoning,
)
from engine.tokenizer_manager.conversation.parsing.families import FAMILIES
from engine.tokenizer_manager.conversation.parsing.output_parser import OutputParser
from engine.tokenizer_manager.conversation.tools import written_calls
from tests.selection import examples
from tests.tokenizer_manager.conversation.parsing.answers import ARGUMENTS, CALLS, NOW, WEATHER, joined, parse

AT_START = ("llama3_json", "pythonic", "generic", "harmony")
TWO_CALLS: list[Delta] = [
    CallBegin(0, "id0", "get_weather"),
    CallArguments(0, ARGUMENTS),
    CallEnd(0),
    CallBegin(1, "id1", "now"),
    CallArguments(1, "{}"),
    CallEnd(1),
]
families = pytest.mark.parametrize("family", sorted(CALLS))


def hermes(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def cut(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in cuts)})
    return [text[begin:end] for begin, end in pairwise(places)]


def test_every_family_has_an_answer_here():
    assert sorted(FAMILIES) == sorted(CALLS)


@families
def test_two_calls(family: str):
    assert parse([CALLS[family]], family) == TWO_CALLS


@pytest.mark.parametrize("family", sorted(set(CALLS) - set(AT_START)))
@pytest.mark.parametrize("space", ["\n\n", " ", ""])
def test_the_whitespace_around_calls_is_dropped_and_a_newline_is_between_contents(family: str, space: str):
    answer = f" I look.{space}{CALLS[family]}{space}Done. "
    expected = [Content(" I look."), *TWO_CALLS, Content("\nDone. ")]

    assert parse([answer], family) == expected
    assert parse(list(answer), family) == expected
    assert parse([CALLS[family] + "\n\nDone."], family) == [*TWO_CALLS, Content("Done.")]


def test_text_between_calls_is_not_glued():
    call = hermes('{"name": "now", "arguments": {}}')
    deltas = parse(list(f"Hi {call}\nand\n{call} bye"), "hermes")

    assert "".join(delta.text for delta in deltas if isinstance(delta, Content)) == "Hi\nand\nbye"


@families
def test_every_cut_gives_the_same_deltas(family: str):
    """vllm#38168: a parser depends on the size of the pieces."""
    text = CALLS[family]
    assert parse(list(text), family) == TWO_CALLS
    for index in range(len(text)):
        assert parse([text[:index], text[index:]], family) == TWO_CALLS


@families
def test_answers_that_are_cut_do_not_depend_on_pieces_and_never_leak_a_marker_after_a_call(family: str):
    text = CALLS[family]
    for size in range(len(text)):
        whole = parse([text[:size]], family)

        assert parse(list(text[:size]), family) == whole
        for delta, following in pairwise(whole):
            if isinstance(following, Content) and not isinstance(delta, Content):
                assert isinstance(delta, CallEnd)
                # a second call that has not begun yet
                assert CALLS[family].count(following.text.strip()) and text[:size].rstrip().endswith(
                    following.text.strip()
                )
                assert size > text.index("now") - 80


@pytest.mark.parametrize("family", sorted(set(CALLS) - {"harmony"}))
def test_a_cut_beginning_of_a_call_is_no_content(family: str):
    """With `auto`, a beginning of a marker that may be text is content: `<`, and a part of a word."""
    text = CALLS[family]
    signs = text[: 2 if text[1] in "|｜" else 1]
    beginnings = [signs[:1], signs] if family != "phi4_mini" else ["functool"[:size] for size in range(1, 9)]
    for size in range(1, len(text)):
        parts = [text[:size]]
        deltas = parse(parts, family, must_call=True)
        assert deltas == parse(list(text[:size]), family, must_call=True)
        assert not any(isinstance(delta, Content) for delta in deltas)
        found = parse(parts, family)
        if family not in AT_START and isinstance(found[-1] if found else None, Content):
            assert found.pop() in [Content(beginning) for beginning in beginnings]
        assert found == deltas
    assert parse(["[TOOL_CALLS]now[ARGS]{}Done ["], "mistral_v11")[-1] == Content("Done [")


@pytest.mark.parametrize(
    ("family", "answer"),
    [
        ("llama3_json", '{"name": "Ali'),
        ("llama3_json", '{"city": "Paris'),
        ("pythonic", "[1, 2"),
        ("pythonic", "[now or later"),
        ("hermes", "5 <"),
        ("phi4_mini", "This is the set of func"),
    ],
)
def test_a_cut_text_that_is_no_beginning_of_a_call_is_content(family: str, answer: str):
    assert parse([answer], family) == [Content(answer)]


IN_REASONING = sorted(set(CALLS) - {*AT_START, "phi4_mini"})


@pytest.mark.parametrize("family", IN_REASONING)
@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("rest", ["", "\n</think>", "</think>\n\nDone."])
def test_a_call_inside_of_open_reasoning_is_a_call(family: str, opened: bool, rest: str):
    """Models begin calls without closing their reasoning; the answer would be empty."""
    answer = f"{'' if opened else '<think>'}I look.\n{CALLS[family]}{rest}"
    content = [Content("Done.")] if rest.endswith("Done.") else []
    for parts in ([answer], list(answer)):
        deltas = parse(parts, family, reasoning="think", opened=opened)
        assert deltas == [Reasoning("I look."), *TWO_CALLS, *content]
    options = ReasoningOptions(stream=False)
    assert parse(list(answer), family, reasoning="think", opened=opened, options=options)[:3] == [
        Reasoning("I look."),
        *TWO_CALLS[:2],
    ]


@pytest.mark.parametrize("family", IN_REASONING)
def test_a_marker_without_a_call_stays_in_the_reasoning(family: str):
    marker = FAMILIES[family].call_markers[-1]
    answer = f"I could write {marker} or {marker}!</think>{CALLS[family]}"
    expected = [Reasoning(f"I could write {marker} or {marker}!"), *TWO_CALLS]
    assert parse([answer], family, reasoning="think", opened=True) == expected
    assert parse(list(answer), family, reasoning="think", opened=True) == expected


def test_a_call_in_an_open_channel_of_harmony_is_a_call():
    answer = f"<|channel|>analysis<|message|>I look.{CALLS['harmony']}"
    for parts in ([answer], list(answer)):
        assert parse(parts, "harmony", reasoning="harmony") == [Reasoning("I look."), *TWO_CALLS]


@pytest.mark.parametrize(
    ("family", "answer"),
    [
        ("hermes", '<tool_call>{"name": "loose", "arguments": {"q": NaN, "n": 1, "n": 2}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"q": NaN, "n": 1, "n": 2}, "name": "loose"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "loose", "arguments": "{\\"q\\": NaN, \\"n\\": 1}"}</tool_call>'),
        ("llama3_json", '{"name": "loose",  "parameters": {"q": NaN, "n": 1, "n": 2}}'),
        ("mistral_v11", '[TOOL_CALLS]loose[ARGS]{"q": NaN, "n": 1, "n": 2}'),
        ("apertus", '<|tools_prefix|>[{"loose": {"q": NaN, "n": 1, "n": 2}}]<|tools_suffix|>'),
        ("generic", '{"tool_calls": [{"name": "loose", "arguments": {"q": NaN, "n": 1, "n": 2}}]}'),
        ("harmony", '<|channel|>commentary to=functions.loose<|message|>{"q": NaN, "n": 1, "n": 2}<|call|>'),
    ],
)
def test_arguments_are_json_in_formats_with_json(family: str, answer: str):
    """A model's own spelling of a call is not held by the grammar."""
    expected = [CallBegin(0, "id0", "loose"), CallArguments(0, '{"q": "NaN", "n": 1}'), CallEnd(0)]
    assert parse([answer], family) == expected
    assert parse(list(answer), family) == expected


@pytest.mark.parametrize(
    ("family", "answer", "arguments"),
    [
        ("pythonic", "[f($filter='a', größe=1)]", '{"$filter": "a", "größe": 1}'),
        ("lfm2", "<|tool_call_start|>[f($filter='a')]<|tool_call_end|>", '{"$filter": "a"}'),
        (
            "gemma4",
            '<|tool_call>call:f{$filter:{<|"|>http://x<|"|>:1,"c:d":[None],e:{}}}<tool_call|>',
            '{"$filter": {"http://x": 1, "c:d": [null], "e": {}}}',
        ),
    ],
)
def test_names_of_arguments_that_are_no_words(family: str, answer: str, arguments: str):
    properties: dict[str, Any] = {"$filter": {}, "größe": {"type": "integer"}}
    tool = Tool(name="f", parameters={"type": "object", "properties": properties})
    expected = [CallBegin(0, "id0", "f"), CallArguments(0, arguments), CallEnd(0)]
    assert parse([answer], family, tools=(tool,)) == expected
    assert parse(list(answer), family, tools=(tool,)) == expected


def test_a_call_followed_by_unexpected_text_ends():
    for family, answer in {
        "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "x"} oops',
        "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nx\n</parameter>\noops",
        "pythonic": '[get_weather(city="x", 5 oops',
    }.items():
        deltas = parse([answer], family)

        assert parse(list(answer), family) == deltas
        assert [type(delta) for delta in deltas] == [CallBegin, CallArguments, CallEnd, Content]
        assert json.loads(deltas[1].text) == {"city": "x"}  # type: ignore[union-attr]


@pytest.mark.parametrize("family", sorted(set(CALLS) - set(AT_START)))
def test_a_call_that_is_cut_is_followed_by_nothing(family: str):
    """vllm#58228: `length` in the middle of a call."""
    text = CALLS[family]
    begin, end = text.index("Par"), text.index("3") + 1
    for size in range(begin, end):
        deltas = parse([text[:size]], family)

        assert [type(delta) for delta in deltas] == [CallBegin, CallArguments]
        assert ARGUMENTS.startswith(deltas[1].text)  # type: ignore[union-attr]


_PIECES = (
    st.sampled_from(
        [piece for text in CALLS.values() for piece in [text, text[:-1], text[1:], text[: len(text) // 2]]]
    )
    | st.sampled_from(
        ["<think>", "</think>", "<tool_call>", "{", "}", "[", "\n", " ", "x", "<", '"', "\\", "<|", "<｜"]
    )
    | st.text(max_size=5)
)


@settings(max_examples=examples(150), deadline=None)
@given(
    family=st.sampled_from(sorted(CALLS)),
    pieces=st.lists(_PIECES, max_size=4),
    cuts=st.lists(st.integers(0, 4096), max_size=12),
    reasoning=st.sampled_from([None, "think", "magistral"]),
    opened=st.booleans(),
)
def test_any_text_gives_the_same_deltas_however_it_is_cut(
    family: str, pieces: list[str], cuts: list[int], reasoning: str | None, opened: bool
):
    text = "".join(pieces)
    whole = parse([text], family, reasoning=reasoning, opened=opened)

    assert parse(cut(text, cuts), family, reasoning=reasoning, opened=opened) == whole
    assert parse(list(text), family, reasoning=reasoning, opened=opened) == whole


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=examples(100), deadline=None)
@given(
    arguments=st.dictionaries(st.text(max_size=6), _VALUES, max_size=4),
    cuts=st.lists(st.integers(0, 999), max_size=6),
)
def test_arguments_are_the_bytes_of_the_model(arguments: dict[str, Any], cuts: list[int]):
    body = json.dumps(arguments, indent=1)
    for text in (f'{{"name": "loose", "arguments": {body}}}', f'{{ "arguments" :{body} ,"name":"loose"}}'):
        assert parse(cut(hermes(text), cuts), "hermes") == [
            CallBegin(0, "id0", "loose"),
            CallArguments(0, body),
            CallEnd(0),
        ]


def test_content_is_streamed_at_once_and_only_a_possible_marker_is_held_back():
    parser = OutputParser(FAMILIES["hermes"], [NOW])

    assert parser.feed("Hello") == [Content("Hello")]
    assert parser.feed(" <tool") == []
    assert parser.feed("s>") == [Content(" <tools>")]


def test_arguments_are_streamed_as_they_arrive():
    parser = OutputParser(FAMILIES["hermes"], [WEATHER], make_id=lambda _, call: f"id{call}")

    assert parser.feed('<tool_call>\n{"name": "get_weather", "arg') == [CallBegin(0, "id0", "get_weather")]
    assert parser.feed('uments": {"city": "Pa') == [CallArguments(0, '{"city": "Pa')]
    assert parser.feed('ris"}') == [CallArguments(0, 'ris"}')]
    assert parser.feed("}") == [CallEnd(0)]
    assert parser.feed("\n</tool_call>", final=True) == []


# ---------------------------------------------------------------- trouble


@pytest.mark.parametrize(
    "answer",
    [
        hermes('{"name": "unknown", "arguments": {}}'),
        hermes('{"name": 5, "arguments": {}}'),
        hermes('{"arguments": {}}'),
        hermes('{"name": "now", "name": '),
        hermes("[]"),
        "see <tool_call> in the docs",
        hermes(
            '{"arguments": ' + json.dumps({"x": "y" * 20_000}) + ', "name": "now"}'
        ),  # too much to hold back
    ],
)
def test_text_that_is_no_call_is_content(answer: str):
    deltas = parse([answer], "hermes")

    if isinstance(deltas[0], Content):
        assert deltas == [Content(answer)]
    else:
        assert deltas[0] == CallBegin(0, "id0", "now")  # its name was known already
    assert parse(list(answer), "hermes") == deltas


def test_a_call_after_text_that_is_no_call_is_found():
    answer = "<tool_call> is a marker. " + hermes('{"name": "now", "arguments": {}}')

    assert parse([answer], "hermes") == [
        Content("<tool_call> is a marker."),
        CallBegin(0, "id0", "now"),
        CallArguments(0, "{}"),
        CallEnd(0),
    ]


def test_a_json_answer_of_a_llama_is_no_call():
    answer = '{"answer": 5, "name": "now"}'

    assert parse(list(answer), "llama3_json") == [Content(answer)]


def test_length_in_the_middle_of_a_call():
    """vllm#58228: a cut call is there with its raw beginning, and has no end."""
    assert parse(['<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par'], "hermes") == [
        CallBegin(0, "id0", "get_weather"),
        CallArguments(0, '{"city": "Par'),
    ]
    assert parse(["<tool_call>\n<function=get_weather>\n<parameter=city>\nPar"], "qwen3_coder") == [
        CallBegin(0, "id0", "get_weather"),
        CallArguments(0, '{"city": "Par'),
    ]
    assert parse(['<tool_call>\n{"name": "get_weather", "arguments": {"city": "x", "da'], "hermes")[1] == (
        CallArguments(0, '{"city": "x", "da')
    )
    assert parse(['Hi.\n<tool_call>\n{"name": "get_wea'], "hermes") == [Content("Hi.")]


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("family", "answer"),
    [
        ("hermes", hermes('{"name": "now", "arguments": {}}')),
        ("hermes", hermes('{"name": "now"}')),
        ("hermes", hermes('{"name": "now", "arguments": null}')),
        ("hermes", hermes('{"name": "now", "arguments": "{}"}')),
        ("hermes", hermes('{"arguments": {}, "name": "now"}')),
        ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "abc123DEF"}]'),
        ("mistral", "[TOOL_CALLS]now[ARGS]{}"),
        ("mistral", "[TOOL_CALLS]now[CALL_ID]abc123DEF[ARGS]{}"),
        ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}'),
        ("llama3_json", '\n{"type": "function", "name": "now", "parameters": {}}'),
        ("pythonic", "<|python_start|>[now()]<|python_end|>"),
        ("qwen3_coder", "<tool_call><function=now></function></tool_call>"),
        ("glm45", "<tool_call>now</tool_call>"),
        (
            "deepseek_v31",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        ("generic", ' { "tool_calls" : [ {"name": "now", "arguments": {}} ] } '),
        ("harmony", "<|channel|>commentary to=functions.now <|constrain|>json<|message|><|call|>"),
        ("harmony", " to=functions.now<|channel|>commentary json<|message|>{}"),  # <|call|> is an EOS token
    ],
)
def test_no_arguments_are_an_empty_object(family: str, answer: str):
    """vllm#28806: a parser drops {}."""
    deltas = parse([answer], family)

    assert [delta for delta in deltas if not isinstance(delta, Content)] == [
        CallBegin(0, "id0", "now"),
        CallArguments(0, "{}"),
        CallEnd(0),
    ]


@pytest.mark.parametrize("arguments", ["[]", "null", '""', '"{}"', "5", '"text"', "[1, {}]"])
def test_arguments_that_are_no_object_are_an_empty_one(arguments: str):
    answer = hermes(f'{{"name": "now", "arguments": {arguments}}}') + "\nDone."
    expected = [CallBegin(0, "id0", "now"), CallArguments(0, "{}"), CallEnd(0), Content("Done.")]

    assert parse([answer], "hermes") == expected
    assert parse(list(answer), "hermes") == expected


@pytest.mark.parametrize(
    "family", [name for name in sorted(CALLS) if FAMILIES[name].also_begins and name not in AT_START]
)
def test_calls_without_the_marker_in_front_of_them(family: str):
    row = FAMILIES[family]
    [marker] = row.also_begins
    text = CALLS[family]
    rest = text.partition(marker if marker in text else row.begin[0])[
        2
    ]  # another spelling of the first piece
    answer = "I look.\n" + marker + rest
    for parts in ([answer], list(answer)):
        assert parse(parts, family) == [Content("I look."), *TWO_CALLS]


def test_llama_writes_a_newline_between_calls():
    answer = CALLS["llama3_json"]
    assert parse(list(answer.replace("; ", "\n")), "llama3_json") == TWO_CALLS
    for text in ("; see above", '; {"x": 1}', '\n{"x": 1}', "; "):
        deltas = parse(list(answer + text), "llama3_json")
        assert deltas[:6] == TWO_CALLS
        assert deltas[6:] == ([Content(text.strip())] if text.strip() != ";" else [])


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, 'a\n"b"\n\\', 'a\n"b"\n\\'),
        ({"type": "integer"}, "5", 5),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, " false ", False),
        ({"type": "array"}, '[1, {"a": "b"}]', [1, {"a": "b"}]),
        ({"type": "object"}, '{"a": null}', {"a": None}),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "text", "text"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "7", 7),
        ({}, "7", 7),
        ({"type": "integer"}, "seven", "seven"),  # lost otherwise
        ({"type": "string"}, "a </param b", "a </param b"),
        ({"type": "string"}, "", ""),
    ],
)
@pytest.mark.parametrize("family", ["qwen3_coder", "glm45", "minimax_m2"])
def test_tagged_values_have_the_type_of_the_schema(
    family: str, schema: dict[str, Any], text: str, value: object
):
    """vllm#18220: a parser loses values that are no strings."""
    tool = Tool(name="f", parameters={"type": "object", "properties": {"v": schema}})
    row = FAMILIES[family]
    answer = "".join(
        piece
        for pieces in (
            (*row.section_begin, *row.call_begin, "f", *row.arguments_begin),
            (*row.parameter_begin, "v", *row.parameter_middle, text, *row.parameter_end),
            (*row.call_end, *row.section_end),
        )
        for piece in pieces
    )

    deltas = parse([answer], family, tools=(tool,))

    assert parse(list(answer), family, tools=(tool,)) == deltas
    assert [type(delta) for delta in deltas] == [CallBegin, CallArguments, CallEnd]
    assert json.loads(deltas[1].text) == {"v": value}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'it\\'s'", "it's"),
        ('"a, b) [c]"', "a, b) [c]"),
        ("[1, 'x', {'k': None}]", [1, "x", {"k": None}]),
        ("-1.5", -1.5),
        ("True", True),
        ("true", True),
        ("not python", "not python"),
    ],
)
def test_pythonic_values(text: str, value: object):
    answer = f"[loose(q={text}, n=1)]"

    deltas = parse([answer], "pythonic")

    assert parse(list(answer), "pythonic") == deltas
    assert json.loads(deltas[1].text) == {"q": value, "n": 1}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('<|"|>a "b", {c}\n<|"|>', 'a "b", {c}\n'),
        ('"it, {}"', "it, {}"),
        ('[1,<|"|>x<|"|>,{k:null,"j":[true]}]', [1, "x", {"k": None, "j": [True]}]),
        ('{<|"|>a b<|"|>:<|"|>x<|"|>,a:1,a:2}', {"a b": "x", "a": 2}),
        ("-1.5", -1.5),
        ("false", False),
        ("None", None),
        ("NaN", "NaN"),
        ("bare words", "bare words"),
        ("[]", []),
        ("{}", {}),
        ("[" * 80 + "]" * 80, None),
    ],
)
def test_values_of_gemma(text: str, value: object):
    answer = f"<|tool_call>call:loose{{q:{text},n:1}}<tool_call|>Done."
    deltas = parse([answer], "gemma4")

    assert parse(list(answer), "gemma4") == deltas
    arguments = json.loads(deltas[1].text)  # type: ignore[union-attr]
    if len(text) < 80:
        assert arguments == {"q": value, "n": 1}
        assert deltas[2:] == [CallEnd(0), Content("Done.")]


@pytest.mark.parametrize(
    ("text", "value"), [("[", []), ("[1", [1]), ("[[1, [2", [[1, [2]]]), ("{a:[true}", {"a": [True]})]
)
def test_a_list_of_gemma_ends_with_the_object_around_it(text: str, value: object):
    """The parser waited for the bracket without reading on: a loop without an end that took all memory."""
    answer = f"<|tool_call>call:loose{{q:{text}}}<tool_call|>Done."
    expected = [CallBegin(0, "id0", "loose"), CallArguments(0, json.dumps({"q": value})), CallEnd(0)]

    for parts in ([answer], list(answer)):
        assert parse(parts, "gemma4") == [*expected, Content("Done.")]


@pytest.mark.parametrize("family", sorted(set(CALLS) - {"generic", "harmony"}))
def test_calls_that_are_written_for_the_history_are_read_back(family: str):
    """Templates of LFM2 and Granite 3 show nothing of earlier calls."""
    calls = [("get_weather", json.loads(ARGUMENTS)), ("now", {})]

    assert written_calls(FAMILIES[family], calls) == CALLS[family]
    nested = ("loose", {"q": {"a": [1, None, "x", True]}, "n": 2})
    deltas = parse([written_calls(FAMILIES[family], [nested])], family)
    assert json.loads(deltas[1].text) == nested[1]  # type: ignore[union-attr]


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "kimi_k2"])
def test_custom_tools_take_text(family: str):
    text = 'ls "a"\n\\é\U0001f600'
    answer = {
        "hermes": hermes(json.dumps({"name": "shell", "arguments": {"input": text}})),
        "qwen3_coder": f"<tool_call>\n<function=shell>\n<parameter=input>\n{text}\n</parameter>\n"
        "</function>\n</tool_call>",
        "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.shell:0<|tool_call_argument_begin|>"
        + json.dumps({"input": text})
        + "<|tool_call_end|><|tool_calls_section_end|>",
    }[family]

    expected = [CallBegin(0, "id0", "shell", custom=True), CallArguments(0, text), CallEnd(0)]
    assert parse([answer], family) == expected
    assert parse(list(answer), family) == expected


# ---------------------------------------------------------------- generic


@pytest.mark.parametrize("text", ["", "Hi", 'say "a"\n\té\\', "\U0001f600 ok"])
def test_the_generic_response_is_unescaped_as_it_arrives(text: str):
    answer = json.dumps({"response": text})

    expected = [Content(text)] if text else []
    assert parse([answer], "generic") == expected
    assert parse(list(answer), "generic") == expected


def test_a_generic_response_may_be_a_json_value():
    assert parse(['{"response": {"a": [1, 2]}}'], "generic") == [Content('{"a": [1, 2]}')]


@pytest.mark.parametrize("answer", ["plain text", '{"other": 1}', '{"responses'])
def test_another_answer_of_the_generic_format_is_content(answer: str):
    assert parse([answer], "generic") == [Content(answer)]


@pytest.mark.parametrize(
    "envelope", ['{ "tool_calls" : [ {', '{"tool_calls": [{"name": "no', '{"response" : ']
)
def test_an_answer_that_is_cut_in_its_envelope_has_no_content(envelope: str):
    for size in range(len(envelope) + 1):
        assert parse([envelope[:size]], "generic") == []
        assert parse(list(envelope[:size]), "generic") == []


def test_halves_of_surrogate_pairs_are_replaced():
    assert parse(['{"response": "a\\ud83dx\\ude00"}'], "generic") == [Content("a\ufffdx\ufffd")]
    assert parse(['{"response": "a\\ud83d'], "generic") == [Content("a\ufffd")]
    assert parse(['{"response": "a\\ud8'], "generic") == [Content("a")]


# ---------------------------------------------------------------- reasoning


@pytest.mark.parametrize(
    ("family", "opened", "answer"),
    [
        ("granite33", False, "<think>I add.</think><response>It is 4.</response>"),
        ("granite33", False, "<think>\nI add.\n</think>\n\n<response>\nIt is 4.\n</response>\n"),
        ("granite33", False, "<think>I add.</think>It is 4."),
        ("apriel", True, "I add.\n[BEGIN FINAL RESPONSE]\nIt is 4.\n[END FINAL RESPONSE]\n"),
        ("apriel", False, "Here are my reasoning steps:\nI add.\n[BEGIN FINAL RESPONSE]\nIt is 4."),
        ("gemma4", False, "<|channel>thought\nI add.\n<channel|>It is 4."),
        ("apertus", False, "<|inner_prefix|>I add.<|inner_suffix|>It is 4."),
        ("command_a", True, "I add.<|END_THINKING|>It is 4."),
        ("command_a", True, "I add.<|END_THINKING|><|START_RESPONSE|>It is 4.<|END_RESPONSE|>"),
        ("cohere2_moe", True, "I add.<|END_THINKING|><|START_TEXT|>It is 4.<|END_TEXT|>"),
    ],
)
@pytest.mark.parametrize("tools", ["hermes", None, "generic"])
def test_reasoning_and_marks_around_the_answer(family: str, opened: bool, answer: str, tools: str | None):
    expected = [Reasoning("I add."), Content("It is 4.")]
    for parts in ([answer], list(answer), *([answer[:n], answer[n:]] for n in range(len(answer)))):
        assert parse(parts, tools, reasoning=family, opened=opened) == expected


def test_marks_without_the_one_at_the_beginning_are_content():
    answer = "<think>a</think>Use </response> at the end."
    assert parse(list(answer), None, reasoning="granite33")[1] == Content("Use </response> at the end.")


def test_reasoning_is_told_from_the_answer():
    answer = "<think>\nhmm, so\n</think>\n\nHello"
    expected = [Reasoning("hmm, so"), Content("Hello")]

    assert parse([answer], "hermes", reasoning="think") == expected
    assert parse(["\n" + answer], None, reasoning="think") == expected
    assert parse([answer.removeprefix("<think>\n")], None, reasoning="think", opened=True) == expected
    assert parse([answer], None, reasoning="think", opened=True) == expected  # the model repeats the marker


def test_calls_follow_the_reasoning_and_markers_in_it_are_none():
    answer = f"I use <tool_call>.</think>\n\n{CALLS['hermes']}"

    assert parse([answer], "hermes", reasoning="think", opened=True) == [
        Reasoning("I use <tool_call>."),
        *TWO_CALLS,
    ]


def test_no_end_marker_means_reasoning_only_if_the_block_is_open():
    """vllm#48863: an answer without reasoning has content null."""
    assert parse(["just text"], None, reasoning="think") == [Content("just text")]
    assert parse(["just text"], None, reasoning="think", opened=True) == [Reasoning("just text")]
    assert parse(["<think>just text"], None, reasoning="think") == [Reasoning("just text")]
    assert parse(["<thin"], None, reasoning="think") == [Content("<thin")]


def test_options_of_reasoning():
    parts = ["<thi", "nk>a", " b", "</think>", "\n\nc"]

    def deltas(**options: Any) -> list[Delta]:
        return parse(parts, None, reasoning="think", options=ReasoningOptions(**options))

    assert deltas(include=False) == [Content("c")]
    assert deltas(separate=False) == [Content("<think>a b</think>\n\nc")]
    assert deltas(stream=False) == [Reasoning("a b"), Content("c")]


def test_reasoning_that_is_not_streamed_is_one_delta():
    parser = OutputParser(None, (), reasoning=None, options=ReasoningOptions(stream=False))
    assert parser.feed("x") == [Content("x")]

    from engine.tokenizer_manager.conversation.parsing.reasoning_families import REASONING_FAMILIES

    parser = OutputParser(
        None, (), reasoning=REASONING_FAMILIES["think"], opened=True, options=ReasoningOptions(stream=False)
    )
    assert parser.feed("a") + parser.feed(" b") == []
    assert parser.feed("</think>") == [Reasoning("a b")]


def test_channels_of_harmony():
    answer = (
        "<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hello<|return|>"
    )

    expected = [Reasoning("think"), Content("I look.Hello")]
    assert parse([answer], "harmony", reasoning="harmony") == expected
    assert parse(list(answer), None, reasoning="harmony", tools=()) == expected
    for text in ("Hello", "<html> to=x", "<|", " t"):
        assert parse([text], None, reasoning="harmony", tools=()) == [Content(text)]


def test_a_harmony_call_that_is_cut_has_no_end():
    answer = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "x'

    assert parse([answer], "harmony") == [CallBegin(0, "id0", "get_weather"), CallArguments(0, '{"city": "x')]


# ---------------------------------------------------------------- ids and cost


def test_ids_of_calls_are_as_the_family_has_them():
    def ids(family: str) -> list[str]:
        parser = OutputParser(FAMILIES[family], (WEATHER, NOW))
        return [delta.id for delta in parser.feed(CALLS[family], True) if isinstance(delta, CallBegin)]

    assert all(len(each) == 29 and each.startswith("call_") for each in ids("hermes"))
    assert len(set(ids("hermes"))) == 2
    assert all(len(each) == 9 and each.isalnum() for each in ids("mistral"))
    assert ids("kimi_k2") == ["functions.get_weather:0", "functions.now:1"]


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "generic"])
def test_the_cost_of_a_token_does_not_grow_with_the_answer(family: str):
    """Twenty times as many tokens take about twenty times as long, not four hundred times."""
    head = {
        "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "',
        "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\n",
        "generic": '{"response": "',
    }[family]

    def cost_s(num_tokens: int) -> float:
        parser = OutputParser(FAMILIES[family], (WEATHER,))
        parser.feed(head)
        begun_s = time.thread_time()
        for _ in range(num_tokens):
            parser.feed("word ")
        return time.thread_time() - begun_s

    short_s = min(cost_s(1_000) for _ in range(3))
    assert cost_s(20_000) < 100 * short_s


def test_joined_is_what_clients_do():
    assert joined([Content("a"), Content("b")]) == [Content("ab")]
