from __future__ import annotations

import contextlib
import json
import re
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.runtime.config.answer_config import RequestLimits
from engine.runtime.errors import RequestError
from engine.tokenizer_manager.http.openai.wire import ChatRequest
from engine.tokenizer_manager.http.schema.field_types import Int
from engine.tokenizer_manager.http.schema.generation_fields import prompts_of
from engine.tokenizer_manager.http.schema.json_body import parse_object
from engine.tokenizer_manager.http.schema.values import convert, show


class Sample(msgspec.Struct):
    count: Int = 0
    ratio: float | None = None
    flag: bool | None = None
    stop: str | list[str] | None = None
    bias: dict[str, float] | None = None
    items: list[dict[str, Int]] | None = None


def refusal(body: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_object(body)
    assert caught.value.status == 400
    return caught.value


def type_error(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        convert(fields, Sample)
    return caught.value


def test_whole_floats_are_integers():
    assert parse_object(b'{"a": 575.0, "b": 0.5, "c": 1e2, "d": -0.0}') == {
        "a": 575,
        "b": 0.5,
        "c": 100,
        "d": 0,
    }
    assert convert(parse_object(b'{"count": 575.0, "ratio": 1.0}'), Sample) == Sample(count=575, ratio=1.0)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "it is empty"),
        (b"  ", "it is empty"),
        (b"{", "line 1 column 2"),
        (b'{"a": 1} x', "Extra data"),
        (b"[1]", "must be an object"),
        (b'"text"', "must be an object"),
        (b'{"a": "\xff"}', "not UTF-8: byte 0xff at offset 7"),
        (b'{"a": ' + b"[" * 40_000, "nested too deeply"),
        (b'{"a": ' + b'{"a": ' * 40_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "4300 digits"),
        (b'{"a": undefined}', "Expecting value"),
        (b"{'a': 1}", "double quotes"),
    ],
)
def test_what_is_not_a_json_object_is_refused_with_the_place(body, message):
    error = refusal(body)

    assert message in error.message
    assert error.code == "invalid_json"


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_does_not_have_are_refused_by_name(constant):
    error = refusal(b'{"temperature": %s}' % constant.encode())

    assert error.param == "temperature"
    assert "finite" in error.message


def test_a_key_twice_is_refused_at_any_depth():
    assert refusal(b'{"model": "a", "model": "b"}').param == "model"
    assert refusal(b'{"messages": [{"role": "a", "role": "b"}]}').param == "messages[0].role"
    assert (
        refusal(b'{"a": {"b": 1, "b": 2}, "a": 1}').param == "a"
    )  # the other one is gone with the first "a"
    assert refusal(b'{"a": 1, "a": 2} x').message.startswith("the body is not valid JSON")
    assert refusal(b'{"mod\\u0065l": "a", "model": "b"}').param == "model"


def test_half_a_surrogate_pair_is_refused_where_it_stands():
    assert refusal(b'{"messages": [{"content": "a\\ud800b"}]}').param == "messages[0].content"
    assert refusal(b'{"\\udfff": 1}').message.startswith("the body has half of a surrogate pair")
    unnamed = refusal(b'{"": "\\ud800"}')
    assert unnamed.param is None and unnamed.message.startswith("a field without a name has half")
    assert parse_object(b'{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}
    assert parse_object(b'{"a": "\\\\ud800"}') == {"a": "\\ud800"}  # a backslash, not an escape


def test_null_is_the_default_of_a_field_that_has_one():
    assert convert(dict.fromkeys(Sample.__struct_fields__), Sample) == Sample()


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"count": "5"}, "count", 'count is "5", but it must be an integer'),
        ({"count": 1.5}, "count", "count is 1.5, but it must be an integer"),
        ({"count": True}, "count", "count is true, but it must be an integer"),
        ({"ratio": "hot"}, "ratio", 'ratio is "hot", but it must be a number'),
        ({"flag": 1}, "flag", "flag is 1, but it must be true or false"),
        ({"stop": 5}, "stop", "stop is 5, but it must be a string or a list"),
        ({"stop": ["a", 1]}, "stop[1]", "stop[1] is 1, but it must be a string"),
        ({"bias": {"5": "x"}}, "bias", "bias has a wrong value: it must be a number"),
        ({"items": [{}, {"a": "x"}]}, "items[1]", "items[1] has a wrong value: it must be an integer"),
        ({"items": {}}, "items", "items is {}, but it must be a list"),
    ],
)
def test_a_wrong_type_names_field_value_and_rule(fields, param, message):
    error = type_error(**fields)

    assert (error.param, error.message) == (param, message)


class First(msgspec.Struct, tag="first"):
    form: Literal["float", "base64"] | None = None
    by_name: dict[Literal["true", "false"], str] | None = None


class Second(msgspec.Struct, tag="second"):
    window: Literal["24h"] = "24h"


class Chosen(msgspec.Struct):
    items: list[First | Second] | None = None
    named: dict[str, First | Second] | None = None


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"type": "first", "form": "hex"}, '.form is "hex", but it must be one of base64, float'),
        ({"type": "second", "window": "1h"}, '.window is "1h", but it must be 24h'),
        ({"type": "third"}, '.type is "third", but it must be one of first, second'),
        (
            {"type": "first", "by_name": {"yes": "a"}},
            '.by_name is {"yes": "a"}, but its keys must be one of false, true',
        ),
    ],
)
def test_a_value_that_is_none_of_a_choice_is_told_the_choice(item, message):
    with pytest.raises(RequestError) as caught:
        convert({"items": [{"type": "first"}, item]}, Chosen)
    assert caught.value.message == f"items[1]{message}"
    with pytest.raises(RequestError) as caught:  # msgspec's paths have no keys
        convert({"named": {"a": item}}, Chosen)
    assert caught.value.message.endswith(message.partition(", but ")[2])


def test_integers_beyond_64_bits_are_refused_before_they_reach_a_message():
    assert type_error(count=2**63).param == "count"
    assert type_error(count=-(2**63) - 1).param == "count"
    assert "out of range" in type_error(ratio=10**400).message


def test_long_values_are_cut_in_messages():
    assert len(type_error(count="x" * 10_000).message) < 150


def test_a_missing_field_is_named():
    with pytest.raises(RequestError, match="messages is missing") as caught:
        convert({}, ChatRequest)

    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("value", "prompts"),
    [
        ("text", ["text"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_a_prompt_has_four_forms(value, prompts):
    assert prompts_of(value, "prompt", max_prompt_len=2) == prompts


@pytest.mark.parametrize(
    "value", [None, "", [], 5, True, {}, [""], [[]], ["a", 1], [1, "a"], [[1], "a"], [[1], []], [1.5]]
)
def test_anything_else_is_no_prompt(value):
    with pytest.raises(RequestError) as caught:
        prompts_of(value, "prompt", max_prompt_len=2)

    assert (caught.value.param or "").startswith("prompt")


@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_any_bytes_are_an_object_or_a_refusal(body):
    with contextlib.suppress(RequestError):
        assert isinstance(parse_object(body), dict)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(Sample.__struct_fields__, _JSON)))
def test_any_value_in_any_field_is_taken_or_refused_with_its_name(fields):
    try:
        convert(fields, Sample)
    except RequestError as error:
        param = error.param or ""
    else:
        return
    assert param.split("[")[0].split(".")[0] in fields


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
@pytest.mark.parametrize("beside", [b"[[1], [2]], ", b"", b'"[[[[[[", '])
def test_depth_is_limited_exactly(opening: bytes, closing: bytes, beside: bytes):
    def nested(depth: int) -> bytes:
        return b'{"x": [' + beside + opening * (depth - 2) + b"5" + closing * (depth - 2) + b"]}"

    assert parse_object(nested(10), RequestLimits(max_json_depth=10))
    with pytest.raises(
        RequestError, match=r"nested too deeply, the limit is 10; .* --max-json-depth"
    ) as caught:
        parse_object(nested(11), RequestLimits(max_json_depth=10))
    assert caught.value.code == "invalid_json"


@pytest.mark.parametrize("empty", [b"[]", b"{}"])
def test_an_empty_value_is_a_level_too(empty: bytes):
    assert parse_object(b'{"x": [' + empty + b"]}", RequestLimits(max_json_depth=3))
    with pytest.raises(RequestError, match="the limit is 3"):
        parse_object(b'{"x": [[' + empty + b"]]}", RequestLimits(max_json_depth=3))


def test_many_flat_values_are_not_deep():
    assert parse_object(b'{"x": [' + b"[1], " * 1000 + b"[]]}", RequestLimits(max_json_depth=3))


@pytest.mark.parametrize("value", [[1, 2, 3], [[1], [1, 2, 3]]])
def test_more_ids_than_the_context_holds_are_refused_before_they_are_looked_at(value):
    name = "prompt" if value[0] == 1 else "prompt[1]"
    with pytest.raises(
        RequestError, match=rf"^{re.escape(name)} has 3 token ids, but the context holds 2"
    ) as caught:
        prompts_of(value, "prompt", max_prompt_len=2)
    assert caught.value.code == "context_length_exceeded"


def test_the_beginning_of_a_value_is_shown_as_json():
    assert show({"a": [1, "é"], "b": None}) == '{"a": [1, "é"], "b": null}'
    assert show("x" * 1_000_000) == '"' + "x" * 59 + "…"
    assert show([1] * 1_000_000) == ("[" + "1, " * 20)[:60] + "…"


def test_keys_strings_lists_and_objects_are_counted_and_what_looks_like_them_in_strings_is_not():
    limits = RequestLimits(max_json_items=10)
    code = '{"a": [1, "b"], "c": {"d": "\\\\"}}' * 50
    text = json.dumps({"prompt": [code, 'x"', "[{:"], "ids": [0] * 1000}).encode()
    assert len(parse_object(text, limits)["ids"]) == 1000
    for body in (
        b'{"x": [[], [], [], [], [], [], [], []]}',
        b'{"x": ["", "", "", "", "", "", "", ""]}',
        b'{"x": {"a": {}, "b": {}, "c": {}, "d": {}}}',
    ):
        with pytest.raises(
            RequestError, match=r"more than 10 keys, strings, lists and objects, .* --max-json-items"
        ):
            parse_object(body, limits)


@pytest.mark.parametrize("end", [b"", b"\\"])
def test_a_string_without_an_end_is_looked_through_once(end: bytes):
    """Looking for its end from each quote inside took a second for 10 KB, and days for what `--max-body-mb` lets in."""
    body = b'{"x": "' + b'\\"[' * 300_000 + end
    with pytest.raises(RequestError, match="the body is not valid JSON: Unterminated string"):
        parse_object(body, RequestLimits(max_json_items=10))


def test_a_flaw_behind_many_values_is_found_by_its_place():
    with pytest.raises(RequestError, match=r"x\[3\]\[1\] is NaN"):
        parse_object(b'{"x": [1, "a", {"b": 1}, [2, NaN]]}')
    with pytest.raises(RequestError, match=r"x\[3\]\[1\] has half of a surrogate pair"):
        parse_object(b'{"x": [1, "a", {"b": 1}, ["\\u00e9", "\\ud800"]]}')


def test_what_is_shown_of_a_value_can_be_written_anywhere():
    assert show("\ud800 é") == '"\\ud800 é"'
