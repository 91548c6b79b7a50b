"""A text never has fewer tokens than the bound says, whatever the tokenizer does with it."""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as CoreTokenizer

from engine.models.tokenizer.token_bytes import _MAX_NFC_SHRINK, BYTE_OF_CHAR, TokenBound, find_token_bound

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
RARE = "ĀĄñÀ"  # bytes 00, 04, F1 and C0, as byte-level vocabularies write them
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(
    *, normalizer: Any = None, added: list[AddedToken] | None = None, without: str = ""
) -> CoreTokenizer:
    """All bytes, and runs of "a" up to 4 and of spaces up to 8."""
    runs, merges = [], []
    for char, lengths in (("a", (2, 4)), ("Ġ", (2, 4, 8))):
        for length in lengths:
            runs.append(char * length)
            merges.append((char * (length // 2), char * (length // 2)))
    tokens = [token for token in ALPHABET + runs if token not in set(without)]
    core = CoreTokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    if normalizer is not None:
        core.normalizer = normalizer
    core.add_special_tokens([AddedToken("<|a|>", special=True), *(added or [])])
    return core


def byte_fallback() -> CoreTokenizer:
    """Bytes, the space, and a token of four spaces, as SentencePiece models write it."""
    vocab = {token: i for i, token in enumerate(["<unk>", *BYTES, "▁", "▁▁", "▁▁▁▁", "a"])}
    model = models.BPE(
        vocab, [("▁", "▁"), ("▁▁", "▁▁")], byte_fallback=True, unk_token="<unk>", fuse_unk=True
    )
    core = CoreTokenizer(model)
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return core


def find(core: CoreTokenizer) -> TokenBound | None:
    return find_token_bound(core, BYTE_OF_CHAR)


STRIPPING = AddedToken("<s>", lstrip=True, rstrip=True, special=True)
TOKENIZERS = {
    "byte level": byte_level(),
    "NFC": byte_level(normalizer=normalizers.NFC()),
    "a token that strips": byte_level(added=[STRIPPING]),
    "byte fallback": byte_fallback(),
    "no token for most bytes": CoreTokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[])),
    "no token for some bytes": byte_level(without=RARE),
    "no token for some bytes, NFC": byte_level(without=RARE, normalizer=normalizers.NFC()),
}
PIECES = ["a" * 16, " " * 40, "▁" * 16, "<s>", "<|a|>", "中", "\u3000", "\x04" * 9, "\U00050000"]
PIECES += ["\u212a", "\u1fbe\u0308\u0301"]  # NFC makes them shorter
TOKENIZERS["no token for most bytes"].pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=12).map("".join)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens(name, text):
    core = TOKENIZERS[name]
    bound = find(core)

    assert bound is not None
    assert bound.min_tokens(text) <= len(core.encode(text, add_special_tokens=False).ids)


def test_the_bound_is_the_longest_token():
    bound = find(TOKENIZERS["byte level"])

    assert bound is not None
    assert bound == (8, True, b"")
    assert bound.min_tokens("a" * 17) == 3


def test_the_longest_token_may_be_an_added_one():
    bound = find(byte_level(added=[AddedToken("<|" + "é" * 20 + "|>")]))

    assert bound is not None
    assert bound.bytes_per_token == 44


def with_(**parts: Any) -> CoreTokenizer:
    core = byte_level()
    for name, part in parts.items():
        setattr(core, name, part)
    return core


@pytest.mark.parametrize(
    "core",
    [
        with_(normalizer=normalizers.Strip()),
        with_(normalizer=normalizers.Replace("aaaa", "a")),
        with_(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.NFKC()])),
        with_(pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
        with_(pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
        with_(pre_tokenizer=None),
        byte_level(without="b", normalizer=normalizers.Replace("x", "b")),
        byte_level(without="b", normalizer=normalizers.NFC()),
        with_(model=models.WordLevel({"a": 0}, unk_token="a")),
        with_(model=models.BPE({"a": 0, "</w>": 1}, [], end_of_word_suffix="</w>")),
    ],
)
def test_what_may_throw_text_away_has_no_bound(core):
    assert find(core) is None


@pytest.mark.slow
def test_nfc_shrinks_no_text_by_more_than_the_bound_assumes():
    longest: dict[str, int] = defaultdict(int)  # of what decomposes to the key, in bytes
    chars = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    for char in chars:
        parts = unicodedata.normalize("NFD", char)
        longest[parts] = max(longest[parts], len(char.encode()))
    worst = 0.0
    for char in chars:
        parts = unicodedata.normalize("NFD", char)
        if len(parts) == 1 and longest[parts] <= len(char.encode()):
            continue
        best = [0] * (len(parts) + 1)  # bytes of the longest text for parts[:end]
        for end in range(1, len(parts) + 1):
            best[end] = max(
                best[begin] + longest[parts[begin:end]] for begin in range(end) if parts[begin:end] in longest
            )
        worst = max(worst, best[-1] / len(unicodedata.normalize("NFC", char).encode()))

    assert 3 < worst <= _MAX_NFC_SHRINK
