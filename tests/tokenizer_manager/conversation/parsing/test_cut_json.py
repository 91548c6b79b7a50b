from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.tokenizer_manager.conversation.parsing.json_text import JsonRepair, object_of

from ...http.answers import objects


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", {}),
        ("{", {}),
        ("nonsense", {}),
        ("[1]", {}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": 1, "b": "x', {"a": 1}),
        ('{"a": [1, {"b": 2}, 3', {"a": [1, {"b": 2}]}),
        ('{"a": "}\\"{", "b": tr', {"a": '}"{'}),
    ],
)
def test_the_complete_members(text, value):
    assert object_of(text) == value


@given(value=objects, data=st.data())
def test_a_cut_object_has_a_part_of_its_members(value, data):
    text = json.dumps(value)
    cut = object_of(text[: data.draw(st.integers(0, len(text)))])

    assert object_of(text) == value
    assert cut.keys() <= value.keys()


def repaired(text: str, size: int) -> str:
    repair = JsonRepair()
    return (
        "".join(repair.feed(text[begin : begin + size]) for begin in range(0, len(text), size)) + repair.end()
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": NaN, "b": [-Infinity, 1e5, -0.5]}', '{"a": "NaN", "b": ["-Infinity", 1e5, -0.5]}'),
        ('{"a": "NaN, {", "b": None, "c": True}', '{"a": "NaN, {", "b": null, "c": true}'),
        ('{"a": 1, "a": {"x": [2, "}"]}, "b": 3}', '{"a": 1, "b": 3}'),
        ('{"a": {"x": 1,  "x": 2}, "b": [{"x": 1}], "a": 4}', '{"a": {"x": 1}, "b": [{"x": 1}]}'),
        ('{"\\u0061": 1, "a": 2}', '{"\\u0061": 1}'),
        ("{'v': None, k: 0x10}", '{"v": null, "k": "0x10"}'),
        ('{"a": [1, 2, ], "b": 01, }', '{"a": [1, 2 ], "b": "01" }'),
        ('{"a": "x\\"y\\\\", "b": +1}', '{"a": "x\\"y\\\\", "b": "+1"}'),
        ('{"a": [1, {"b": ', '{"a": [1, {"b": null}]}'),
        ('{"a": "x', '{"a": "x"}'),
        ('{"a": "x\ny\t"\n}', '{"a": "x\\u000ay\\u0009"\n}'),
        ('{"a": tru', '{"a": "tru"}'),
        ('{"a": 1, "b', '{"a": 1}'),
    ],
)
def test_arguments_that_are_no_json_become_json(text: str, expected: str):
    json.loads(expected)
    assert {repaired(text, size) for size in (1, 2, 3, 100)} == {expected}


@given(value=objects, data=st.data())
def test_json_is_passed_on_as_it_is_and_a_cut_one_is_ended(value, data):
    text = json.dumps(value, indent=data.draw(st.sampled_from([None, 1])), ensure_ascii=False)
    size = data.draw(st.integers(1, 9))
    assert repaired(text, size) == text

    cut = text[: data.draw(st.integers(1, len(text)))]
    assert json.loads(repaired(cut, size)).keys() <= value.keys()
