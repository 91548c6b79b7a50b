"""Tokenizers and vocabularies for the tests of grammar/."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as CoreTokenizer

from engine.grammar.backend import Vocabulary
from engine.grammar.llguidance_backend import LLGuidanceBackend
from engine.grammar.vocabulary import TokenizerVocabulary
from engine.models.tokenizer.tokenizer import Tokenizer

MERGES = [
    *(("t", "r"), ("u", "e"), ("tr", "ue"), ('"', ":"), ('"', ","), ("{", '"'), ("a", "b"), ("ab", "c")),
    *(("Ġ", '"'), (",", "Ġ"), ('":', "Ġ"), ("Ċ", "Ġ"), ("Ġ", "Ġ"), ("[", "]"), ('"', "}"), ("1", "2")),
]
DOCS = Path(__file__).parents[2] / "docs"
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


def word_tokenizer() -> Tokenizer:
    """1,500 pieces, trained on the documents of the project: words, JSON signs in one piece, parts of characters."""
    core = CoreTokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))]
    core.train_from_iterator([*texts, '{"name": "é", "age": 1}, [{"a": "", "b": []}]' * 50], trainer)
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
def byte_backend(tokenizer: Tokenizer) -> LLGuidanceBackend:
    """With 300 logits and two EOS tokens."""
    eos = [tokenizer.token_to_id(text) for text in SPECIALS[:2]]
    return LLGuidanceBackend(TokenizerVocabulary(tokenizer, 300, [i for i in eos if i is not None]))


@pytest.fixture(scope="session")
def word_backend() -> LLGuidanceBackend:
    """With the pieces of `word_tokenizer`, in 1,504 logits."""
    tokenizer = word_tokenizer()
    return LLGuidanceBackend(TokenizerVocabulary(tokenizer, 1504, [tokenizer.token_to_id(SPECIALS[0]) or 0]))


@pytest.fixture(scope="session")
def backend(byte_backend: LLGuidanceBackend) -> LLGuidanceBackend:
    return byte_backend


@pytest.fixture(scope="session")
def vocabulary(byte_backend: LLGuidanceBackend) -> Vocabulary:
    """A vocabulary of 300 logits, with two EOS tokens."""
    return byte_backend.vocabulary


def compact(value: object) -> bytes:
    """JSON without whitespace."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
