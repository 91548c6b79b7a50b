from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.tokenizer_manager.conversation.parsing.json_text import object_of

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
