"""`PartialPrefills`: how the prompt tokens of a step are shared among prompts that are computed in chunks.

The rules of vLLM V0 (`max_num_partial_prefills`, `max_long_partial_prefills`, `long_prefill_token_threshold`). With one
partial prefill, the default, a prompt of 32,000 tokens takes whole steps until it is done, and all later requests wait.
With several, each takes only its share of the step, and the number of long ones is limited: the other shares are for
short prompts.

Different from vLLM: unused shares are not lost. The leftover of a pass goes to the prompts that were cut
(`PrefillAdder.use_leftover`). So a long prompt alone is not slowed down, and beside short prompts it loses only the
tokens that they use.
"""

from __future__ import annotations

from typing import NamedTuple, Self

from ...runtime.config.engine_config import SchedulerConfig
from ..arrays import IntArray


class PartialLimits(NamedTuple):
    """Limits from the configuration.

    Attributes:
        max_partial: partial prefills at the same time.
        max_long: how many of them may be long.
        long_threshold: a prompt is long while more tokens than this remain to be computed; 0: none is long.
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
        """Whether a prompt with `remaining` tokens to compute counts as long. With one partial prefill, none does."""
        return self.max_partial > 1 and 0 < self.long_threshold < remaining


class PartialPrefills:
    """The shares and counts of one pass.

    Attributes:
        share: tokens that one prompt may take of this step.
    """

    def __init__(self, limits: PartialLimits, *, page_size: int, step_tokens: int, num_prompts: int) -> None:
        """Divide the step into shares of whole pages, at least one, for `num_prompts` but at most `max_partial`.

        Args:
            step_tokens: prompt tokens that the step may compute.
            num_prompts: partial prefills and waiting requests. Requests that cannot start are counted as well: finding
                them would mean examining the whole queue, and the leftover is used anyway.
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
        """Whether a waiting prompt is long and the maximum number of long ones is being computed."""
        return self._limits.is_long(extend_len) and self._num_long >= self._limits.max_long

    def count(self, remaining: int, length: int) -> None:
        """A prompt with `remaining` uncomputed tokens computes `length` of them in this step."""
        self._num_partial += length < remaining
        self._num_long += self._limits.is_long(remaining)


def reserved_tokens(remaining: IntArray, page_size: int) -> int:
    """KV slots for the `remaining` tokens of each prompt, [P], rounded up to whole pages per prompt.

    Without rounding each of several prompts could lack its last page while no running request frees one.
    """
    return int((-(-remaining // page_size)).sum()) * page_size
