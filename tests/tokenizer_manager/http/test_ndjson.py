from __future__ import annotations

import json

from engine.tokenizer_manager.http.framing import line


def test_a_value_is_one_line_for_clients_that_split_text():
    value = {"a": "\x85 \u2028 \u2029 \\\u2028 \x0b \x1c ü \n"}
    text = line(value).decode()

    assert len(text.splitlines()) == 1
    assert json.loads(text) == value
