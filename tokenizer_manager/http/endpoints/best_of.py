"""`best_of`: generate more answers than are returned, and return the most likely ones.

The order is OpenAI's: by mean log-probability per token, so that long answers are not at a disadvantage. It needs
complete answers, so such a request does not stream. Usage counts all generated answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ....runtime.config.request_limits import RequestLimits
from ....runtime.errors import RequestError
from ...generation import Choice, Generation
from ..delivery import Collected
from ..schema.limits import check_count


class Wanted(NamedTuple):
    """The number of answers per prompt.

    Attributes:
        returned: `n`.
        generated: `best_of`; the same as `returned` without ranking.
    """

    returned: int
    generated: int

    @property
    def ranked(self) -> bool:
        """Whether some answers are left out."""
        return self.generated > self.returned

    def logprobs(self, asked: int | None) -> int | None:
        """The log-probabilities to compute: as the client asked, or those of the sampled tokens, for ranking."""
        return 0 if asked is None and self.ranked else asked


def wanted_answers(n: int, best_of: int | None, limits: RequestLimits, *, stream: bool) -> Wanted:
    """The numbers of answers for `n`, which is checked already, and `best_of`.

    Raises:
        RequestError: `best_of` is out of range, below `n`, or cannot be streamed.
    """
    if best_of is None:
        return Wanted(n, n)
    check_count("best_of", best_of, 1, limits.max_n, "max_n")
    if best_of < n:
        rule = f"n is {n}, and the best n are chosen among best_of; raise best_of or lower n"
    elif best_of > n and stream:
        rule = f"n is {n}, and which are best is known only in the end; leave out stream or best_of"
    else:
        return Wanted(n, best_of)
    raise RequestError(f"best_of is {best_of}, but {rule}", param="best_of", code="invalid_value")


def best_answers(
    generation: Generation, answers: Sequence[Collected], wanted: Wanted
) -> list[tuple[Choice, Collected]]:
    """The answers to return, prompt by prompt: the best first, or all in their order without ranking."""
    pairs = list(zip(generation.choices, answers, strict=True))
    if not wanted.ranked:
        return pairs
    best: list[tuple[Choice, Collected]] = []
    for first in range(0, len(pairs), wanted.generated):
        of_prompt = pairs[first : first + wanted.generated]
        of_prompt.sort(key=lambda pair: _mean_logprob(pair[1]), reverse=True)  # stable: ties keep their order
        best += of_prompt[: wanted.returned]
    return best


def _mean_logprob(answer: Collected) -> float:
    """An answer without tokens (it ended before the first) ranks last."""
    if not answer.logprobs:
        return -math.inf
    return math.fsum(entry.logprob for entry in answer.logprobs) / len(answer.logprobs)
