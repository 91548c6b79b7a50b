"""Tokenizers and vocabularies for the tests of grammar/."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as CoreTokenizer

from engine.grammar.llguidance_backend import LLGuidanceBackend
from engine.grammar.vocabulary import TokenizerVocabulary
from engine.models.tokenizer.tokenizer import Tokenizer

MERGES = [
    *(("t", "r"), ("u", "e"), ("tr", "ue"), ('"', ":"), ('"', ","), ("{", '"'), ("a", "b"), ("ab", "c")),
    *(("Ġ", '"'), (",", "Ġ"), ('":', "Ġ"), ("Ċ", "Ġ"), ("Ġ", "Ġ"), ("[", "]"), ('"', "}"), ("1", "2")),
]
SPECIALS = ("<|end|>", "<|stop|>", "<think>")


def byte_level_tokenizer() -> Tokenizer:
    """A token per byte, a few merges, and three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(a + b for a, b in MERGES)]
    core = CoreTokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=list(MERGES)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return Tokenizer(core, special_tokens={}, eos_token_ids=(), chat_templates={})


def sentencepiece_tokenizer() -> Tokenizer:
    """SentencePiece with byte fallback; it puts a space before each text."""
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["<s>", "</s>", *byte_pieces, "▁", "a", "b", "{", '"', ":", "ab", "▁ab"]
    merges = [("a", "b"), ("▁", "ab")]
    core = CoreTokenizer(
        models.BPE(
            vocab={p: i for i, p in enumerate(pieces)}, merges=merges, byte_fallback=True, fuse_unk=True
        )
    )
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)
    core.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    return Tokenizer(core, special_tokens={}, eos_token_ids=(1,), chat_templates={})


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_level_tokenizer()


@pytest.fixture(scope="session")
def vocabulary(tokenizer: Tokenizer) -> TokenizerVocabulary:
    """Of 300 logits, with two EOS tokens."""
    eos = [tokenizer.token_to_id(text) for text in SPECIALS[:2]]
    return TokenizerVocabulary(tokenizer, 300, [i for i in eos if i is not None])


@pytest.fixture(scope="session")
def backend(vocabulary: TokenizerVocabulary) -> LLGuidanceBackend:
    return LLGuidanceBackend(vocabulary)


def compact(value: object) -> bytes:
    """JSON without whitespace."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
