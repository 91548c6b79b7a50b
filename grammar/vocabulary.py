"""`TokenizerVocabulary`: the tokens of a model as grammar libraries need them, made from its tokenizer.

The encode function matters for correctness: llguidance tokenizes forced text with it, and allows only the first of
these tokens there. Thus every result is checked against the bytes, and text that the tokenizer cannot reproduce is
split greedily into the longest tokens.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Final

from ..models.tokenizer.tokenizer import Tokenizer

_SENTINEL: Final = "\x02"
"""Put before a text, so that a space that the tokenizer prepends is not part of the text's tokens."""


class TokenizerVocabulary:
    """The `Vocabulary` of a tokenizer. Immutable, so threads may share it.

    Attributes:
        size: V, of the logits.
        eos_token_ids: those that the tokenizer has.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, eos_token_ids: Sequence[int]) -> None:
        """Read the bytes of all tokens; takes 50 ms for 50,000 tokens.

        Args:
            tokenizer: of the model.
            size: V, of the logits; the tokenizer may have fewer or more tokens.
            eos_token_ids: all tokens that end an answer.
        """
        self._tokenizer = tokenizer
        self.size = size
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(size)]
        while tokens and not tokens[-1]:
            tokens.pop()
        self._tokens = tuple(tokens)
        self.eos_token_ids = tuple(i for i in dict.fromkeys(eos_token_ids) if 0 <= i < len(tokens))
        special = {token_id for token_id in range(len(tokens)) if tokenizer.is_special(token_id)}
        self._special = frozenset(special.union(self.eos_token_ids))

    @property
    def tokens(self) -> Sequence[bytes]:
        """The bytes of each token; b"" for an id without a token."""
        return self._tokens

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Control tokens and EOS tokens."""
        return self._special

    def encode(self, data: bytes) -> list[int]:
        """Tokens whose bytes, joined, are `data`. Special tokens that are written in it are split like other text."""
        token_ids: list[int] = []
        position = 0
        while position < len(data):
            try:
                text, bad_end = data[position:].decode(), len(data)
            except UnicodeDecodeError as error:
                text, bad_end = data[position : position + error.start].decode(), position + error.end
            for piece in self._pieces(text):
                token_ids += self._encode_text(piece)
            good_end = position + len(text.encode())
            if good_end < bad_end:
                token_ids += self._encode_greedily(data[good_end:bad_end])
            position = bad_end
        return token_ids

    def _pieces(self, text: str) -> list[str]:
        """The text, cut inside of each special token that is written in it."""
        if self._special_text is None:
            return [text] if text else []
        cuts = [match.start() + 1 for match in self._special_text.finditer(text)]
        return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) if a < b]

    def _encode_text(self, text: str) -> list[int]:
        data = text.encode()
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if self._is_split_of(token_ids, data):
            return token_ids
        token_ids = self._tokenizer.encode(_SENTINEL + text, add_special_tokens=False)
        sentinel = _SENTINEL.encode()
        for index, token_id in enumerate(token_ids):
            if self._bytes_of(token_id).endswith(sentinel):
                if self._is_split_of(token_ids[index + 1 :], data):
                    return token_ids[index + 1 :]
                break
        return self._encode_greedily(data)

    def _is_split_of(self, token_ids: Sequence[int], data: bytes) -> bool:
        return b"".join(map(self._bytes_of, token_ids)) == data and self._special.isdisjoint(token_ids)

    def _bytes_of(self, token_id: int) -> bytes:
        return self._tokens[token_id] if token_id < len(self._tokens) else b""

    def _encode_greedily(self, data: bytes) -> list[int]:
        """The longest token at each position; a byte that no token begins with is left out."""
        token_ids: list[int] = []
        position = 0
        while position < len(data):
            for length in range(min(self._max_token_bytes, len(data) - position), 0, -1):
                token_id = self._id_of.get(data[position : position + length])
                if token_id is not None:
                    token_ids.append(token_id)
                    position += length
                    break
            else:
                position += 1
        return token_ids

    @functools.cached_property
    def _id_of(self) -> dict[bytes, int]:
        text_ids = (i for i, data in enumerate(self._tokens) if data and i not in self._special)
        return {self._tokens[token_id]: token_id for token_id in reversed(list(text_ids))}

    @functools.cached_property
    def _max_token_bytes(self) -> int:
        return max(map(len, self._id_of), default=0)

    @functools.cached_property
    def _special_text(self) -> re.Pattern[str] | None:
        """Finds the text of special tokens of at least two characters, the longest first."""
        texts = {self._tokens[token_id].decode(errors="replace") for token_id in self._special}
        texts = {text for text in texts if len(text) > 1}
        if not texts:
            return None
        return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))
