"""JSON files of a model: what is not clear is refused."""

from __future__ import annotations

import pytest

from engine.models.model_files import read_json
from engine.runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "message"),
    [
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


def test_of_two_values_the_last_is_taken_and_a_warning_says_so(tmp_path, caplog):
    path = tmp_path / "config.json"
    path.write_text('{"a": {"b": 1, "b": 2}, "c": 3, "c": 3}')
    assert read_json(path) == {"a": {"b": 2}, "c": 3}
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: twice in one object, with different values: 'b'; the last ones are taken"
    ]
