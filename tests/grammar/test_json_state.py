"""`JsonState`: the position in a JSON text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.grammar.json_state import JsonState

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def state_of(text: bytes) -> JsonState:
    state = JsonState()
    state.read(text)
    return state


@pytest.mark.parametrize(
    ("text", "in_string", "is_name", "escape_len", "utf8_len"),
    [
        (b'{"a', True, True, 0, 0),
        (b'{"a":"b', True, False, 0, 0),
        (b'{"a":["b","c', True, False, 0, 0),
        (b'{"a":["b"],"c', True, True, 0, 0),
        (b'"\\', True, False, 1, 0),
        (b'"\\"', True, False, 0, 0),
        (b'"\\\\"', False, False, 0, 0),
        (b'"\\u', True, False, 4, 0),
        (b'"\\u00e', True, False, 1, 0),
        (b'"\\u00e9', True, False, 0, 0),
        (b'"\xf0\x9f', True, False, 0, 2),
        ('"é'.encode(), True, False, 0, 0),
    ],
)
def test_positions_in_strings(text, in_string, is_name, escape_len, utf8_len):
    state = state_of(text)
    assert (state.in_string, state.escape_len, state.utf8_len) == (in_string, escape_len, utf8_len)
    assert state.is_name == is_name or not in_string


@given(values, st.booleans(), st.data())
def test_a_copy_goes_on_independently(value, ascii_only, data):
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    cut = data.draw(st.integers(0, len(text)))
    state = state_of(text[:cut])
    twin = state.copy()
    twin.read(text[cut:])
    assert not twin.in_string and twin.last == text[-1]
    again = state_of(text[:cut])
    assert (state.in_string, state.last, state.escape_len) == (again.in_string, again.last, again.escape_len)
