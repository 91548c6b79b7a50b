"""`RepetitionCheck`: whether an answer ends with a pattern of tokens that is there several times, as in vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from ..runtime.sampling_params import RepetitionDetection


class RepetitionCheck:
    """The last tokens of one answer, and for each size of a pattern how long the answer has repeated itself.

    A pattern of p tokens is there c times if each of the last p * (c - 1) tokens equals the one p before it. So one
    count for each size is enough, which a new token raises or sets to 0.
    """

    __slots__ = ("_counts", "_min_count", "_sizes", "_tokens")

    def __init__(self, wanted: RepetitionDetection) -> None:
        self._sizes = range(max(1, wanted.min_pattern_size), wanted.max_pattern_size + 1)
        self._min_count = wanted.min_count
        self._counts = [0] * len(self._sizes)
        self._tokens: list[int] = []

    @classmethod
    def of(cls, wanted: RepetitionDetection | None) -> Self | None:
        """The check of a request; None if it wants none."""
        return None if wanted is None or wanted.max_pattern_size == 0 else cls(wanted)

    def push(self, token_ids: Sequence[int]) -> bool:
        """Take new tokens; whether the answer ends with a repeated pattern now."""
        found = False
        for token_id in token_ids:
            known = len(self._tokens)
            found = False
            for n, size in enumerate(self._sizes):
                if size > known or self._tokens[-size] != token_id:
                    self._counts[n] = 0
                    continue
                self._counts[n] += 1
                found = found or self._counts[n] >= size * (self._min_count - 1)
            self._tokens.append(token_id)
            if known >= 2 * self._sizes.stop:
                del self._tokens[: self._sizes.stop]
        return found
