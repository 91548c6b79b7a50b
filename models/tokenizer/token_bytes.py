"""`TokenBytes`: the bytes of each token of a vocabulary; `TokenBound`: a lower bound of a text's number of tokens.

The bytes are exact for byte-level BPE and SentencePiece: joined, they are the text's UTF-8. The tokens of WordPiece are
not: it folds case and drops spaces, so that they can be shown, but generate no text.

With the bound the front ends refuse texts that are far too long at once: tokenizing 15 MB takes seconds. A token covers
at most as many bytes as the longest one in the vocabulary, so a text has at least its bytes divided by that. This holds
only for tokenizers that drop no input; for any other there is no bound.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from tokenizers import Tokenizer as CoreTokenizer
from tokenizers import models

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_EXACT: Final = frozenset({"ByteLevel", "ByteFallback", "Metaspace"})
_CONTINUES_WORD: Final = "##"


def _byte_alphabet() -> dict[int, int]:
    """The inverse of GPT-2's byte-level alphabet, for `str.translate`: character -> character of the byte.

    Printable Latin-1 characters map to themselves; the other 68 bytes are numbered from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {char: char for char in printable} | {0x100 + i: byte for i, byte in enumerate(others)}


BYTE_OF_CHAR: Final = _byte_alphabet()


class TokenBytes:
    """See the module.

    Attributes:
        decoder_kinds: the kinds of decoders that the tokenizer chains.
    """

    def __init__(self, core: CoreTokenizer) -> None:
        """Take the vocabulary and the decoder of a tokenizer of the `tokenizers` library."""
        self.decoder_kinds = frozenset(_decoder_kinds(core))
        self._core = core
        added = core.get_added_tokens_decoder()
        self._known = {token_id: token.content.encode() for token_id, token in added.items()}

    @property
    def is_exact(self) -> bool:
        """Whether the bytes of a text's tokens, joined, are the text's."""
        return not self.decoder_kinds.isdisjoint(_EXACT)

    def of(self, token_id: int) -> bytes:
        """The bytes of a token; an id without one (padding of the embedding) has none."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._encode(self._core.id_to_token(token_id) or "")
        return known

    @functools.cached_property
    def without_token(self) -> bytes:
        """Bytes that no token of a byte-level vocabulary stands for."""
        if "ByteLevel" not in self.decoder_kinds:
            return b""
        return bytes(
            sorted(byte for char, byte in BYTE_OF_CHAR.items() if self._core.token_to_id(chr(char)) is None)
        )

    def _encode(self, token: str) -> bytes:
        if "ByteLevel" in self.decoder_kinds:
            try:
                return token.translate(BYTE_OF_CHAR).encode("latin-1")
            except UnicodeEncodeError:
                return token.encode()  # not in the byte alphabet: plain text
        if "ByteFallback" in self.decoder_kinds and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        if not self.is_exact:
            return token.removeprefix(_CONTINUES_WORD).encode()
        return token.replace("▁", " ").encode()


def _decoder_kinds(core: CoreTokenizer) -> Iterator[str]:
    """The kinds of decoder that this tokenizer chains; the library exposes them only in serialized form."""
    if core.decoder is None:
        return
    stack = [json.loads(core.decoder.__getstate__())]
    while stack:
        decoder = stack.pop()
        stack.extend(decoder.get("decoders", ()))
        yield decoder["type"]


_MAX_NFC_SHRINK: Final = 4
"""Most bytes of a text per byte of its NFC form: 3.5 over all of Unicode, see the test."""

_NFC_INERT: Final = frozenset([*range(0x20), 0x7F, 0xC0, 0xC1, *range(0xF1, 0x100)])
"""Bytes that NFC neither produces nor changes: ASCII control characters, planes 4 to 16, and bytes not in UTF-8."""

_LOSSLESS_STEPS: Final = frozenset({"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"})
_SPLITTING_STEPS: Final = frozenset({"Punctuation", "Split"})  # lossless unless they remove the separator


class TokenBound(NamedTuple):
    """A lower bound of a text's number of tokens.

    Attributes:
        bytes_per_token: most bytes of text per token.
        counts_spaces: False if special tokens absorb the space around them, so that spaces are not counted.
        uncounted_bytes: bytes without a token, which are dropped; published vocabularies lack some control characters.
    """

    bytes_per_token: int
    counts_spaces: bool
    uncounted_bytes: bytes = b""

    def min_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens of `text`."""
        if not self.counts_spaces:
            text = "".join(text.split())
        num_bytes = len(text.encode("utf-8", "surrogatepass").translate(None, self.uncounted_bytes))
        return -(-num_bytes // self.bytes_per_token)


def find_token_bound(core: CoreTokenizer, byte_of_char: Mapping[int, int]) -> TokenBound | None:
    """The bound for a tokenizer, or None if none is certain. Takes 15 ms for 49,152 tokens.

    Args:
        core: the tokenizer.
        byte_of_char: the alphabet of byte-level vocabularies: character -> byte.
    """
    normalizer = _state(core.normalizer)
    shrink = _normalizer_shrink(normalizer)
    pre_tokenizer = _state(core.pre_tokenizer)
    if shrink is None or not _keeps_everything(pre_tokenizer) or not isinstance(core.model, models.BPE):
        return None
    if core.model.continuing_subword_prefix or core.model.end_of_word_suffix:
        return None
    vocab = core.get_vocab(with_added_tokens=False)
    # Text without a token is dropped, or a long part of it becomes one unknown token.
    missing: frozenset[int] = frozenset()
    if "ByteLevel" in _kinds(pre_tokenizer):
        missing = frozenset(byte for char, byte in byte_of_char.items() if chr(char) not in vocab)
        if missing and not (normalizer is None or (normalizer["type"] == "NFC" and missing <= _NFC_INERT)):
            return None  # the normalizer may produce them from others
        longest = max(map(len, vocab))  # one character per byte
    elif core.model.byte_fallback:
        if not vocab.keys() >= {f"<0x{byte:02X}>" for byte in range(256)}:
            return None
        longest = max(len(token.encode()) for token in vocab)
    else:
        return None
    added = core.get_added_tokens_decoder().values()
    longest = max(longest, *(len(token.content.encode()) for token in added), 1)
    counts_spaces = not any(token.lstrip or token.rstrip for token in added)
    return TokenBound(longest * shrink, counts_spaces, bytes(sorted(missing)))


def _state(step: Any) -> dict[str, Any] | None:
    """The settings of a step; the library exposes them only in serialized form."""
    return None if step is None else json.loads(step.__getstate__())


def _normalizer_shrink(normalizer: dict[str, Any] | None) -> int | None:
    """Most bytes of text that become one byte of normalized text; None: there is no known limit."""
    match normalizer:
        case None | {"type": "Prepend"}:
            return 1
        case {"type": "NFC"}:
            return _MAX_NFC_SHRINK
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return 1 if len(new.encode()) >= len(old.encode()) else None
        case {"type": "Sequence", "normalizers": [*steps]}:
            product = 1
            for step in steps:
                shrink = _normalizer_shrink(step)
                if shrink is None:
                    return None
                product *= shrink
            return product
        case _:
            return None


def _keeps_everything(pre_tokenizer: dict[str, Any] | None) -> bool:
    match pre_tokenizer:
        case None:
            return True
        case {"type": "Sequence", "pretokenizers": [*steps]}:
            return all(_keeps_everything(step) for step in steps)
        case {"type": str(kind)}:
            if kind in _SPLITTING_STEPS:
                return pre_tokenizer.get("behavior") != "Removed"
            return kind in _LOSSLESS_STEPS
        case _:
            return False


def _kinds(pre_tokenizer: dict[str, Any] | None) -> set[str]:
    if pre_tokenizer is None:
        return set()
    return {pre_tokenizer["type"]}.union(*(_kinds(step) for step in pre_tokenizer.get("pretokenizers", ())))
