"""`PartialPrefills`: how the prompt tokens of a step are shared among prompts that are computed in chunks.

The rules of vLLM V0 (`max_num_partial_prefills`, `max_long_partial_prefills`, `long_prefill_token_threshold`). With one
partial prefill, which is the default, a prompt of 32,000 tokens takes whole steps until it is done, and all that came
behind it waits. With several, each may take only its share of the step, and only so many of them may be long: the
others' shares are open to short ones.

One thing is ours: a share that nobody needs is not lost. What a pass leaves over goes to the prompts that were cut
(`PrefillAdder.use_leftover`), so a long prompt alone is as fast as ever, and beside short ones it lacks no more than
what they take.
"""

from __future__ import annotations

from typing import NamedTuple, Self

from ...runtime.config.engine_config import SchedulerConfig
from ..arrays import IntArray


class PartialLimits(NamedTuple):
    """What the configuration says.

    Attributes:
        max_partial: prompts that may be in the middle of their chunks.
        max_long: how many of them may be long.
        long_threshold: a prompt is long while more tokens than this are left to compute; 0: none is long.
    """

    max_partial: int = 1
    max_long: int = 1
    long_threshold: int = 0

    @classmethod
    def of(cls, config: SchedulerConfig) -> Self:
        """The limits that a resolved configuration sets."""
        return cls(
            config.max_num_partial_prefills,
            config.max_long_partial_prefills,
            config.long_prefill_token_threshold,
        )

    def is_long(self, remaining: int) -> bool:
        """Whether a prompt with so many tokens left counts as long. With one partial prefill, none does."""
        return self.max_partial > 1 and 0 < self.long_threshold < remaining


class PartialPrefills:
    """One pass.

    Attributes:
        share: tokens that one prompt may take of this step.
    """

    __slots__ = ("_limits", "_num_long", "_num_partial", "share")

    def __init__(self, limits: PartialLimits, *, page_size: int, step_tokens: int, num_prompts: int) -> None:
        """Divide the step: whole pages, at least one, for each of as many prompts as there are and may be.

        Args:
            step_tokens: prompt tokens that the step may compute.
            num_prompts: prompts in the middle of their chunks, and requests that wait. Who waits in vain is counted,
                too: to know it would mean to look at all of them, and the leftover is used anyway.
        """
        self._limits = limits
        self._num_partial = 0
        self._num_long = 0
        num_shares = min(num_prompts, limits.max_partial)
        self.share = step_tokens
        if num_shares > 1:
            self.share = max(step_tokens // num_shares // page_size, 1) * page_size

    @property
    def may_cut(self) -> bool:
        """Whether one more prompt may be left unfinished by this step."""
        return self._num_partial < self._limits.max_partial

    def too_many_long(self, extend_len: int) -> bool:
        """Whether a waiting prompt is long, and as many long ones are being computed as may."""
        return self._limits.is_long(extend_len) and self._num_long >= self._limits.max_long

    def count(self, remaining: int, length: int) -> None:
        """A prompt that lacked `remaining` tokens computes `length` of them in this step."""
        self._num_partial += length < remaining
        self._num_long += self._limits.is_long(remaining)


def reserved_tokens(remaining: IntArray, page_size: int) -> int:
    """KV slots that the rests of prompts, [P] tokens each, will take: whole pages of each.

    With their sum alone, each of several prompts could lack its last page, with nobody left to give one back.
    """
    return int((-(-remaining // page_size)).sum()) * page_size
