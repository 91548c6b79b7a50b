"""`pointer_at_end` against all beginnings of documents."""

from __future__ import annotations

import pytest

from engine.grammar.json_position import pointer_at_end


@pytest.mark.parametrize(
    ("text", "pointer"),
    [
        ("", ""),
        ("{", ""),
        ('{"na', ""),
        ('{"name"', ""),
        ('{"name":', "/name"),
        ('{"name": "Ada', "/name"),
        ('{"name": "a, b: {[', "/name"),
        ('{"name": "\\", "', "/name"),
        ('{"name": "Ada"', "/name"),
        ('{"name": "Ada",', ""),
        ('{"name": "Ada", "age": 3', "/age"),
        ('{"people": [', "/people/0"),
        ('{"people": [{"a": 1}, {', "/people/1"),
        ('{"people": [{"a": 1}, {"b": [[], 2, ', "/people/1/b/2"),
        ('{"people": [1, 2]', "/people"),
        ('{"people": [1, 2]}', ""),
        ("[1, [2, 3], ", "/2"),
        ('{"a/b": {"~": ', "/a~1b/~0"),
        ('{"a\\u0062": ', "/ab"),
        ('"text, with: {signs', ""),
    ],
)
def test_the_pointer_of_the_end(text, pointer):
    assert pointer_at_end(text) == pointer


@pytest.mark.parametrize("text", ["}", "]]", ",,", ":::", '{"\\x": ', "{:", "[:", '\\"', "{]}["])
def test_what_is_no_json_has_some_pointer(text):
    assert isinstance(pointer_at_end(text), str)
