"""`TokenBytes`: the bytes of each token of a vocabulary.

Exact for byte-level BPE and SentencePiece: the bytes of a text's tokens, joined, are the text's UTF-8. The tokens of
WordPiece are not: it folds case and drops spaces, so that they can be shown, but generate no text.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from typing import Final

from tokenizers import Tokenizer as CoreTokenizer

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
