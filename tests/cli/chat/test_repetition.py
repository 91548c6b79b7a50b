"""Repetition: loops are noticed, tables and long texts are not."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cli.chat.answer import find_loop
from engine.runtime.text import LOOP


@pytest.mark.parametrize("unit", ["\n", "a", "The answer is no. ", "x" * 120 + "y"])
def test_a_loop_is_noticed(unit):
    text, found = "An answer that begins well. ", None
    for _ in range(2 * LOOP.min_chars // len(unit) + 2 * LOOP.min_times):
        text += unit
        found = found or find_loop(text)
    assert found is not None and len(found.unit) == len(unit) and found.times >= LOOP.min_times
    assert sorted(found.unit) == sorted(unit)


def test_texts_that_only_resemble_each_other_are_no_loop():
    rows = "".join(f'{{"id": {number}, "name": "item", "tags": ["a", "b"]}},\n' for number in range(300))
    words = random.Random(3).choices(["yes", "no", "maybe", "so"], k=2000)
    for text in (rows, " ".join(words), "ab" * (LOOP.min_chars // 2 - 1), ""):
        assert find_loop(text[-4000:]) is None


@given(st.text(alphabet="ab", max_size=30), st.text(alphabet="ab", min_size=1, max_size=9))
def test_what_is_found_is_there(head, unit):
    text = head + unit * (LOOP.min_chars // len(unit) + LOOP.min_times)
    loop = find_loop(text)
    assert loop is not None and len(loop.unit) <= len(unit)
    assert text.endswith(loop.unit * loop.times)
