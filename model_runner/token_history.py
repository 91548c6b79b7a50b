"""`TokenHistory`: the last tokens of a request, on the host, and the changes of logits that depend on them.

Only requests with DRY or with bad words of several tokens have one. The penalties of DRY are those of llama.cpp
(`llama_sampler_dry_apply`; the idea is p-e-w's in text-generation-webui), in a few operations of numpy over the window
for each token: the repetition that ends at a place is one longer than the one that ended before it, if the token there
equals the new one. A client chooses window and breakers, so the time for a token must not depend on what they are.
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
        """Begin with prompt and output so far, [length]; with DRY some 2 ms for the longest window."""
        self._bad_words = [word for word in sampling.bad_words_ids if len(word) > 1]
        self._longest = max(map(len, self._bad_words), default=1) - 1
        self._last: list[int] = token_ids[prompt_len:][-self._longest :].tolist() if self._longest else []
        last_n = sampling.dry_penalty_last_n if sampling.has_dry else 0
        self._window = MAX_DRY_TOKENS if last_n < 0 else last_n
        self._params = sampling
        self._breakers = frozenset(sampling.dry_breaker_ids)
        self._breaker_lens = sorted({len(breaker) for breaker in self._breakers})
        self.length = len(token_ids)
        # Twice the window, so that it moves to the front once in W tokens.
        self._tokens = np.zeros(2 * self._window, dtype=np.int32)
        self._repeats = np.zeros(2 * self._window, dtype=np.int32)  # tokens up to a place that equal the last
        known = token_ids[-self._window :] if self._window else token_ids[:0]
        self._end = len(known)
        self._tokens[: self._end] = known
        self._repeats[: self._end] = _common_endings(known.tolist())
        # The last place at which a breaker begins, counted over the request, and the end of the longest one there.
        self._breaker_place = self._breaker_end = -1
        for place in range(self._end - 1, -1, -1):
            if lengths := [n for n in self._breaker_lens if self._has_breaker(place, place + n)]:
                self._breaker_place = self.length - self._end + place
                self._breaker_end = self._breaker_place + lengths[-1]
                break

    def append(self, token: int) -> None:
        """Add a sampled token; some 10 us with DRY."""
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
        for n in self._breaker_lens:
            if self._has_breaker(self._end - n, self._end):
                if self.length - n >= self._breaker_place:
                    self._breaker_place, self._breaker_end = self.length - n, self.length
                break  # the longer ones begin before it

    def _has_breaker(self, start: int, end: int) -> bool:
        """Whether these tokens, which all are known, are a breaker."""
        return start >= 0 and end <= self._end and tuple(self._tokens[start:end].tolist()) in self._breakers

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
        limit = len(tokens)  # the longest repetition that the last breaker in the window leaves
        if self._breaker_place >= self.length - len(tokens):
            limit = self.length - self._breaker_end
        if limit < allowed:
            return {}
        most = 0
        if params.dry_base > _LEAST_GROWING_BASE:
            most = int(_FLOAT_MAX_LOG / math.log(params.dry_base))
        # The last token ends no repetition of itself. A repetition does not begin before the window.
        repeats = np.minimum(self._repeats[start : self._end - 1], np.arange(1, len(tokens)))
        repeats = np.minimum(repeats, limit)
        places = np.flatnonzero(repeats >= allowed)
        # The longest repetition of each token: the last of those with the token, once sorted.
        found = np.sort(tokens[places + 1].astype(np.int64) * (MAX_DRY_TOKENS + 1) + repeats[places])
        following, lengths = np.divmod(found, MAX_DRY_TOKENS + 1)
        last = np.flatnonzero(np.append(following[1:] != following[:-1], True)) if len(found) else places
        return {
            token: params.dry_multiplier * params.dry_base ** min(length - allowed, most or length)
            for token, length in zip(following[last].tolist(), lengths[last].tolist(), strict=True)
            if (token,) not in self._breakers
        }


def _common_endings(tokens: list[int]) -> list[int]:
    """For each place but the last, how many tokens up to it equal the last tokens: the Z-algorithm, backward."""
    backward, count = tokens[::-1], len(tokens)
    found, left, right = [0] * count, 0, 0
    for i in range(1, count):
        length = min(right - i, found[i - left]) if i < right else 0
        while i + length < count and backward[length] == backward[i + length]:
            length += 1
        found[i] = length
        if i + length > right:
            left, right = i, i + length
    return found[::-1]
