"""The tokens of a text that a request names, against llama.cpp's way: ask each token of the vocabulary."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.models.tokenizer.texts_in_tokens import TextsInTokens
from engine.runtime.errors import RequestError

WORDS = [b"a", b"b", b"aa", b"ab", b"ba", b"aab", b"abab", "é".encode(), "é".encode()[:1], b"", b"bb"]


def encode(text: str) -> list[int]:
    """One token for each character."""
    return [{"a": 0, "b": 1, "é": 7}[char] for char in text]


def by_asking(text: bytes) -> set[tuple[int, ...]]:
    found: set[tuple[int, ...]] = set()
    for token_id, word in enumerate(WORDS):
        if text in word:
            found.add((token_id,))
            continue
        for length in range(1, len(text)):
            if word.endswith(text[:length]):
                tail = text[length:].decode(errors="replace")
                if "\ufffd" not in tail:
                    found.add((token_id, *encode(tail)))
    return found


@given(st.text("abé", min_size=1, max_size=5))
def test_the_sequences_are_those_of_each_token(text):
    found = TextsInTokens(len(WORDS), WORDS.__getitem__, encode).sequences(text)
    assert set(found) == by_asking(text.encode())
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("text", ["a", "ab"])
def test_a_text_in_too_many_tokens_is_refused(text):
    texts = TextsInTokens(40_000, lambda token_id: b"%da" % token_id, lambda text: [1])
    with pytest.raises(RequestError, match="may appear in at most 32768 tokens") as caught:
        texts.sequences(text)
    assert caught.value.param == "dry_sequence_breakers"
    assert len(texts.sequences("1")) < 32_768
