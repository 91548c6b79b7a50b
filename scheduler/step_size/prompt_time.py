"""`PromptTime`: seconds that the prompts of one step may take, spent chunk by chunk."""

from __future__ import annotations

import math
from typing import Final, NamedTuple, Self

UNLIMITED: Final = 1 << 60
"""Tokens; more than there ever are."""


class StepTime(NamedTuple):
    """What one pass knew of its step's time, for the decision log; predictions.

    Attributes:
        target_s: the configured one.
        decodes_s: of the running requests alone.
        waiting_s: of all prompts that wait, if they were computed now.
        prompts_s: what prompts may take.
        left_s: of that, after the pass; below 0 where a page alone takes longer.
        token_s: of a prompt token, its attention left out; 0 while no prompt has been measured: then nothing is cut.
    """

    target_s: float
    decodes_s: float
    waiting_s: float
    prompts_s: float
    left_s: float
    token_s: float

    def text(self) -> str:
        """One line for people."""
        ms = 1000.0
        return (
            f"target {self.target_s * ms:.1f} ms: decodes {self.decodes_s * ms:.1f} ms; of waiting prompts, which take "
            f"{self.waiting_s * ms:,.0f} ms, at most {self.prompts_s * ms:.1f} ms ({self.left_s * ms:.1f} ms left; "
            f"{self.token_s * ms:.3f} ms per token)"
        )


class PromptTime:
    """One pass.

    Attributes:
        decodes_s, waiting_s: what the step's decodes should take, and the prompts that wait; for the log.
        given_s: what prompts may take.
        left_s: of that, now.
        token_s, pair_s: what a prompt token takes, and one (query, key) pair of its attention.
    """

    __slots__ = (
        "_page_size",
        "_spent_nothing",
        "decodes_s",
        "given_s",
        "left_s",
        "pair_s",
        "token_s",
        "waiting_s",
    )

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
        """Start a pass; the first chunk may take a page whatever it costs, so that prompts never stand still."""
        self.decodes_s = decodes_s
        self.waiting_s = waiting_s
        self.given_s = self.left_s = given_s
        self.token_s = token_s
        self.pair_s = pair_s
        self._page_size = page_size
        self._spent_nothing = True

    @classmethod
    def unlimited(cls) -> Self:
        """Time is no limit."""
        return cls(math.inf, token_s=0.0, pair_s=0.0, page_size=1)

    @property
    def is_unlimited(self) -> bool:
        """Whether time is no limit."""
        return self.given_s == math.inf

    @property
    def is_spent(self) -> bool:
        """Whether there is no time for a single token more, wherever it stands."""
        return self.most_tokens(0) < 1

    def most_tokens(self, start: int) -> int:
        """The longest run of prompt tokens, the first of them at position `start`, that there is time for.

        The m for which token_s · m + pair_s · (m · start + m (m + 1) / 2) is what is left.
        """
        if self.is_unlimited:
            return UNLIMITED
        least = self._page_size if self._spent_nothing else 0
        if self.left_s <= 0:
            return least
        first_s = self.token_s + self.pair_s * (start + 0.5)
        # the root of the quadratic in the form that does not cancel when pairs cost nearly nothing
        root = math.sqrt(first_s * first_s + 2 * self.pair_s * self.left_s)
        return max(int(min(2 * self.left_s / (first_s + root), UNLIMITED)), least)

    def spend(self, start: int, length: int) -> None:
        """A chunk is computed."""
        self._spent_nothing = False
        pairs = length * start + length * (length + 1) / 2
        self.left_s -= self.token_s * length + self.pair_s * pairs
