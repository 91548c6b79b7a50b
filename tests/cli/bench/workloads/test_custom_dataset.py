"""`--dataset-name custom`: rows of the user's own, and each way to get one wrong."""

import json

import pytest

from engine import ConfigError
from engine.cli.bench.workloads.texts import custom_requests

from .test_datasets import WordTokenizer


def read(path, text, num_prompts=10):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return custom_requests(path, num_prompts, WordTokenizer(), output_len=7)


def test_rows_are_taken_in_their_order_with_their_lengths(tmp_path):
    rows = [{"prompt": "one two"}, {"prompt": "three", "output_tokens": 3, "other": 1}, {"prompt": "a b c"}]
    text = "\n\n".join(json.dumps(row) for row in rows)
    requests = read(tmp_path / "x.jsonl", text)
    assert [(each.prompt, each.prompt_len, each.output_len) for each in requests] == [
        ("one two", 2, 7),
        ("three", 1, 3),
        ("a b c", 3, 7),
    ]
    assert read(tmp_path / "x.jsonl", text, num_prompts=2) == requests[:2]


def test_a_line_separator_of_unicode_does_not_end_a_row(tmp_path):
    (request,) = read(tmp_path / "x.jsonl", '{"prompt": "a\u2028b"}')
    assert request.prompt == "a\u2028b"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no row"),
        ("\n \n", "has no row"),
        ('{"prompt": "a"}\n{', ":2: not JSON: "),
        ('["a"]', ":1: no prompt; a row is "),
        ('{"text": "a"}', ":1: no prompt"),
        ('{"prompt": ""}', ":1: no prompt"),
        ('{"prompt": [1, 2]}', ":1: no prompt"),
        ('{"prompt": "\\ud83d"}', ":1: no prompt"),
        (
            '{"prompt": "a", "output_tokens": 0}',
            ":1: output_tokens is 0, but it must be a whole number from 1",
        ),
        ('{"prompt": "a", "output_tokens": "5"}', ":1: output_tokens is '5'"),
        ('{"prompt": "a", "output_tokens": true}', ":1: output_tokens is True"),
        (b'{"prompt": "caf\xe9"}', "is not UTF-8 text: byte 0xe9 at position 15"),
    ],
)
def test_a_wrong_row_is_named_with_its_line(tmp_path, text, problem):
    path = tmp_path / "x.jsonl"
    with pytest.raises(ConfigError) as refused:
        read(path, text)
    assert str(path) in str(refused.value)
    assert problem in str(refused.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="--dataset-path .*none cannot be read: No such file"):
        custom_requests(tmp_path / "none", 1, WordTokenizer(), output_len=1)
