"""`TextsInTokens`: the tokens in which a text appears or begins, for DRY's breakers.

llama.cpp (`get_overlapping_token_sequences`) asks each token of the vocabulary; here the bytes of all tokens are one
buffer, which is searched in C: 1 ms for a vocabulary of 152k, so the request that is first to name a text does not
hold others.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

MAX_TAIL_TOKENS: Final = 20
"""As in llama.cpp."""
_CACHED_TEXTS: Final = 256


class TextsInTokens:
    """The vocabulary of one tokenizer."""

    def __init__(
        self, vocab_size: int, token_bytes: Callable[[int], bytes], encode: Callable[[str], list[int]]
    ) -> None:
        """`encode`: without special tokens."""
        parts = [token_bytes(token_id) for token_id in range(vocab_size)]
        self._bytes = b"".join(parts)
        self._ends = np.fromiter(itertools.accumulate(map(len, parts)), dtype=np.int64, count=vocab_size)
        self._encode = encode
        self.sequences = functools.lru_cache(_CACHED_TEXTS)(self._sequences)

    def _sequences(self, text: str) -> tuple[tuple[int, ...], ...]:
        """The token sequences of which the text is a part: a token that has it, or one that ends with its first bytes
        and the tokens of the other ones. Without repeats.
        """
        data = text.encode()
        found: dict[tuple[int, ...], None] = {}
        whole = {token_id for token_id, _ in self._places(data)}
        found.update(dict.fromkeys((token_id,) for token_id in sorted(whole)))
        for length in range(1, len(data)):
            try:
                tail = tuple(self._encode(data[length:].decode())[:MAX_TAIL_TOKENS])
            except UnicodeDecodeError:  # within a character
                continue
            heads = {token_id for token_id, end in self._places(data[:length]) if end == self._ends[token_id]}
            found.update(dict.fromkeys((token_id, *tail) for token_id in sorted(heads - whole)))
        return tuple(found)

    def _places(self, data: bytes) -> Iterator[tuple[int, int]]:
        """The token of each place within one token, and the place's end."""
        ends = np.array(
            [m.start() + len(data) for m in re.finditer(b"(?=%s)" % re.escape(data), self._bytes)]
        )
        if not len(ends):
            return
        tokens = np.searchsorted(self._ends, ends)  # the first token that ends there or later
        starts = np.concatenate(([0], self._ends))[tokens]
        within = ends - len(data) >= starts
        yield from zip(tokens[within].tolist(), ends[within].tolist(), strict=True)
