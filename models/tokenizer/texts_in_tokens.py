"""`TextsInTokens`: the tokens in which a text appears or begins, for DRY's breakers.

llama.cpp (`get_overlapping_token_sequences`) asks each token of the vocabulary; here the bytes of all tokens are one
array, so the request that is first to name a text does not hold others: some ms for a vocabulary of 152k.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from ...runtime.request_checks import refused

Int64s = npt.NDArray[np.int64]

MAX_DRY_SEQUENCES: Final = 32_768
"""The most of a request: they are kept with each one, and single letters are in half of a vocabulary."""
MAX_TAIL_TOKENS: Final = 20
"""As in llama.cpp."""
_CACHED_TEXTS: Final = 64


class TextsInTokens:
    """The vocabulary of one tokenizer."""

    def __init__(
        self, vocab_size: int, token_bytes: Callable[[int], bytes], encode: Callable[[str], list[int]]
    ) -> None:
        """`encode`: without special tokens."""
        parts = [token_bytes(token_id) for token_id in range(vocab_size)]
        self._bytes = np.frombuffer(b"".join(parts), dtype=np.uint8)
        self._ends = np.fromiter(itertools.accumulate(map(len, parts)), dtype=np.int64, count=vocab_size)
        self._lengths = np.diff(self._ends, prepend=0)
        self._encode = encode
        self.sequences = functools.lru_cache(_CACHED_TEXTS)(self._sequences)

    def _sequences(self, text: str) -> tuple[tuple[int, ...], ...]:
        """The token sequences of which the text is a part: a token that has it, or one that ends with its first bytes
        and the tokens of the other ones. Without repeats.

        Raises:
            RequestError: there are more than `MAX_DRY_SEQUENCES`.
        """
        data = text.encode()
        whole = self._tokens_with(data)
        found: list[tuple[int, ...]] = [(token_id,) for token_id in whole.tolist()]
        for length in range(1, len(data)):
            try:
                rest = data[length:].decode()
            except UnicodeDecodeError:  # within a character
                continue
            heads = np.setdiff1d(self._tokens_before(data[:length]), whole)
            if len(heads):
                tail = tuple(self._encode(rest)[:MAX_TAIL_TOKENS])
                found += [(token_id, *tail) for token_id in heads.tolist()]
            check_num_sequences(len(found), text)
        check_num_sequences(len(found), text)
        return tuple(dict.fromkeys(found))

    def _tokens_with(self, data: bytes) -> Int64s:
        """The tokens that have these bytes, ascending."""
        places = np.flatnonzero(self._bytes[: len(self._bytes) - len(data) + 1] == data[0])
        for n, byte in enumerate(data[1:], 1):
            places = places[self._bytes[places + n] == byte]
        tokens = np.searchsorted(self._ends, places, side="right")  # the token of the first byte
        within: Int64s = np.unique(tokens[places + len(data) <= self._ends[tokens]])
        return within

    def _tokens_before(self, data: bytes) -> Int64s:
        """The tokens that end with these bytes, ascending."""
        tokens = np.flatnonzero(self._lengths >= len(data))
        for n, byte in enumerate(reversed(data), 1):
            tokens = tokens[self._bytes[self._ends[tokens] - n] == byte]
        return tokens


def check_num_sequences(count: int, text: str) -> None:
    """Refuse the breakers of a request that appear in too many tokens; `text`: the one to name.

    Raises:
        RequestError: they do.
    """
    if count > MAX_DRY_SEQUENCES:
        rule = f"may appear in at most {MAX_DRY_SEQUENCES} tokens, all breakers together; name longer texts"
        raise refused("dry_sequence_breakers", text, rule)
