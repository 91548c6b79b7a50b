"""`TokenHistory`: the last tokens of a request, on the host, and the changes of logits that depend on them.

Only requests with DRY or with bad words of several tokens have one. The penalties of DRY are those of llama.cpp
(`llama_sampler_dry_apply`; the idea is p-e-w's in text-generation-webui), computed anew for each token in one pass over
the window: the repetition that ends at a place is one longer than the one that ended before it, if the token there
equals the new one.
"""

# Shapes: W tokens of the window, at most `MAX_DRY_TOKENS`.

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from ..runtime.sampling_params import MAX_DRY_TOKENS, SamplingParams

_FLOAT_MAX_LOG: Final = 88.7228391
"""Logarithm of the largest float32: larger powers are cut, as in llama.cpp."""
_LEAST_GROWING_BASE: Final = 1.000001


class TokenHistory:
    """The tokens of one request so far.

    Attributes:
        length: tokens of prompt and output.
    """

    def __init__(self, sampling: SamplingParams, token_ids: npt.NDArray[np.int32], prompt_len: int) -> None:
        """Begin with prompt and output so far, [length]; with DRY some 5 us for each token of the window."""
        self._bad_words = [word for word in sampling.bad_words_ids if len(word) > 1]
        self._longest = max(map(len, self._bad_words), default=1) - 1
        self._last: list[int] = token_ids[prompt_len:][-self._longest :].tolist() if self._longest else []
        last_n = sampling.dry_penalty_last_n if sampling.has_dry else 0
        self._window = MAX_DRY_TOKENS if last_n < 0 else last_n
        self._params = sampling
        breakers = sampling.dry_breaker_ids
        self._single_breakers = frozenset(head for head, *tail in breakers if not tail)
        self._breakers: dict[int, list[list[int]]] = {}
        for head, *tail in breakers:
            self._breakers.setdefault(head, []).append(tail)
        # Twice the window, so that it moves to the front once in W tokens.
        self._tokens = np.zeros(2 * self._window, dtype=np.int32)
        self._repeats = np.zeros(
            2 * self._window, dtype=np.int32
        )  # tokens before and at a place that equal the last
        self._end = 0
        self.length = len(token_ids)
        for token in token_ids[-self._window :].tolist() if self._window else ():
            self._append(token)

    def append(self, token: int) -> None:
        """Add a sampled token."""
        self.length += 1
        self._last = [*self._last, token][-self._longest :] if self._longest else []
        if self._window:
            self._append(token)

    def _append(self, token: int) -> None:
        if self._end == len(self._tokens):
            for values in (self._tokens, self._repeats):
                values[: self._window] = values[-self._window :]
            self._end = self._window
        start, end = max(0, self._end - self._window), self._end
        equal = self._tokens[start:end] == token
        repeats = self._repeats[start:end]
        longer = np.zeros_like(repeats)
        longer[1:] = repeats[:-1]
        longer += 1
        repeats[:] = longer * equal
        self._tokens[end], self._repeats[end] = token, 0
        self._end += 1

    def changes(self) -> dict[int, float]:
        """Values to add to logits: penalties, and -inf for the last token of a bad word that is otherwise there.

        Bad words are those of the output, as in vLLM.
        """
        changes = {token: -penalty for token, penalty in self.penalties().items()} if self._window else {}
        for *begin, last in self._bad_words:
            if self._last[-len(begin) :] == begin:
                changes[last] = -math.inf
        return changes

    def penalties(self) -> dict[int, float]:
        """The penalty of each token that would continue a repetition, above 0."""
        params, allowed = self._params, self._params.dry_allowed_length
        start = max(0, self._end - self._window)
        tokens = self._tokens[start : self._end]
        if len(tokens) <= allowed:
            return {}
        limit = self._limit(tokens)
        if limit < allowed:
            return {}
        most = 0
        if params.dry_base > _LEAST_GROWING_BASE:
            most = int(_FLOAT_MAX_LOG / math.log(params.dry_base))
        # The last token ends no repetition of itself. A repetition does not begin before the window.
        repeats = np.minimum(self._repeats[start : self._end - 1], np.arange(1, len(tokens)))
        repeats = np.minimum(repeats, limit)
        places = np.flatnonzero(repeats >= allowed)
        longest: dict[int, int] = {}
        for token, length in zip(tokens[places + 1].tolist(), repeats[places].tolist(), strict=True):
            if token not in self._single_breakers:
                longest[token] = max(length, longest.get(token, 0))
        return {
            token: params.dry_multiplier * params.dry_base ** min(length - allowed, most or length)
            for token, length in longest.items()
        }

    def _limit(self, tokens: npt.NDArray[np.int32]) -> int:
        """The longest repetition that the last breaker leaves."""
        if not self._breakers:
            return len(tokens)
        reversed_tokens = tokens[::-1].tolist()
        for i, token in enumerate(reversed_tokens):
            tails = self._breakers.get(token)
            if tails is None:
                continue
            matching = [
                len(tail)
                for tail in tails
                if len(tail) <= i and reversed_tokens[i - len(tail) : i][::-1] == tail
            ]
            if matching:
                return i - max(matching)
        return len(tokens)
