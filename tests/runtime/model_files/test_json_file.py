"""JSON files of a model: what is not clear is refused."""

from __future__ import annotations

import pytest

from engine.runtime.errors import ConfigError
from engine.runtime.model_files.json_file import read_json


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "the field 'a' is there twice, with different values"),
        ('{"a": {"b": "\\ud800"}}', "not valid JSON .*surrogates"),
        ('{"\\udfff": 1}', "not valid JSON .*surrogates"),
        ("[" * 100_000, "not valid JSON"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
        ("\xff", "not valid JSON"),
        ("[]", "holds a JSON list, expected an object"),
    ],
)
def test_what_is_not_clear_is_refused(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=message) as caught:
        read_json(path)
    assert str(path) in str(caught.value)


def test_the_same_twice_and_whole_pairs_are_read(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"a": [1], "a": [1], "b": "\\ud83d\\ude42"}')
    assert read_json(path) == {"a": [1], "b": "🙂"}
