"""`PromptTime`: the seconds that the prompts of one step may take; each chunk spends a part."""

from __future__ import annotations

import math
from typing import Final, Self

UNLIMITED: Final = 1 << 60
"""A number of tokens that is never reached."""


class PromptTime:
    """The time budget of one pass.

    Attributes:
        decodes_s, waiting_s: predicted time of the step's decodes, and of the waiting prompts; for the log.
        given_s: time that prompts may take.
        left_s: the part of it that is not spent.
        token_s, pair_s: predicted time of a prompt token, and of one (query, key) pair of its attention.
    """

    def __init__(
        self,
        given_s: float,
        *,
        token_s: float,
        pair_s: float,
        page_size: int,
        decodes_s: float = 0.0,
        waiting_s: float = 0.0,
    ) -> None:
        """Start a pass; the first chunk may always take a page, so that prompts make progress."""
        self.decodes_s = decodes_s
        self.waiting_s = waiting_s
        self.given_s = self.left_s = given_s
        self.token_s = token_s
        self.pair_s = pair_s
        self._page_size = page_size
        self._spent_nothing = True

    @classmethod
    def unlimited(cls) -> Self:
        """A budget without a limit."""
        return cls(math.inf, token_s=0.0, pair_s=0.0, page_size=1)

    @property
    def is_unlimited(self) -> bool:
        """Whether time is no limit."""
        return self.given_s == math.inf

    @property
    def is_spent(self) -> bool:
        """Whether there is no time for one more token, at any position."""
        return self.most_tokens(0) < 1

    def most_tokens(self, start: int) -> int:
        """The longest run of prompt tokens from position `start` that fits in the remaining time.

        The m for which token_s · m + pair_s · (m · start + m (m + 1) / 2) = left_s.
        """
        if self.is_unlimited:
            return UNLIMITED
        least = self._page_size if self._spent_nothing else 0
        if self.left_s <= 0:
            return least
        first_s = self.token_s + self.pair_s * (start + 0.5)
        # the root of the quadratic in the form without cancellation when pair_s is close to 0
        root = math.sqrt(first_s * first_s + 2 * self.pair_s * self.left_s)
        return max(int(min(2 * self.left_s / (first_s + root), UNLIMITED)), least)

    def spend(self, start: int, length: int) -> None:
        """Subtract the predicted time of a chunk of `length` tokens from position `start`."""
        self._spent_nothing = False
        pairs = length * start + length * (length + 1) / 2
        self.left_s -= self.token_s * length + self.pair_s * pairs
