"""`TokenizerVocabulary`: bytes of tokens, and an encode function that reproduces every text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.grammar.vocabulary import TokenizerVocabulary

from .conftest import MERGES, SPECIALS, byte_level_tokenizer, sentencepiece_tokenizer

NUM_TEXT_TOKENS = 256 + len(MERGES)
EOS_IDS = (NUM_TEXT_TOKENS, NUM_TEXT_TOKENS + 1)
BYTE_LEVEL = TokenizerVocabulary(byte_level_tokenizer(), 300, EOS_IDS)
SENTENCEPIECE = TokenizerVocabulary(sentencepiece_tokenizer(), 300, (1,))
TEXT = st.lists(
    st.one_of(st.binary(max_size=4), st.sampled_from([*map(str.encode, SPECIALS), b" ", b"ab", b"<s>"]))
)


@pytest.mark.parametrize("vocabulary", [BYTE_LEVEL, SENTENCEPIECE])
@given(parts=TEXT)
def test_the_tokens_of_a_text_join_to_it(vocabulary, parts):
    data = b"".join(parts)

    token_ids = vocabulary.encode(data)

    assert b"".join(vocabulary.tokens[i] for i in token_ids) == data
    assert vocabulary.special_token_ids.isdisjoint(token_ids)


@pytest.mark.parametrize("text", ['{"abc": 12}', "true", ' "', "abababc", "é"])
def test_text_is_split_as_the_tokenizer_splits_it(text):
    expected = byte_level_tokenizer().encode(text, add_special_tokens=False)

    assert BYTE_LEVEL.encode(text.encode()) == expected


def test_a_space_that_the_tokenizer_puts_before_a_text_is_left_out():
    assert [SENTENCEPIECE.tokens[i] for i in SENTENCEPIECE.encode(b"ab ab")] == [b"ab", b" ab"]
    assert [SENTENCEPIECE.tokens[i] for i in SENTENCEPIECE.encode(b" ab")] == [b" ab"]


def test_padding_of_the_logits_has_no_tokens(tokenizer):
    vocabulary = TokenizerVocabulary(tokenizer, 1000, (*EOS_IDS, *EOS_IDS, 999, -1))

    assert vocabulary.size == 1000
    assert len(vocabulary.tokens) == tokenizer.vocab_size
    assert vocabulary.eos_token_ids == EOS_IDS


def test_logits_that_are_narrower_than_the_tokenizer_limit_it(tokenizer):
    assert len(TokenizerVocabulary(tokenizer, 100, ()).tokens) == 100


def test_an_eos_token_is_special_even_if_the_tokenizer_calls_it_text(tokenizer):
    assert 5 in TokenizerVocabulary(tokenizer, 300, (5,)).special_token_ids
