"""`Planes`: the arguments of a program's calls as linear functions of the step size (T, W).

Each argument is a constant plus a multiple of T plus a multiple of W, for the `Steps` that make the same calls.
"""

# Shapes: T tokens of a step, W of them need logits.

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import numpy as np

from ....runtime.step_plan import MAX_DRAFT_STEP_TOKENS
from ...kernels.blocks.native_blocks import TILES_FROM

if TYPE_CHECKING:
    import numpy.typing as npt

    Words = npt.NDArray[np.int64]

MAX_TOKENS: Final = 2048
"""Largest T of a program; larger steps are launched call by call, which costs them little. Only the memory that steps
have written is resident."""
LEAST_TOKENS: Final = 2
"""Least T of a program; smaller steps are decodes, which are recorded."""
BORDERS: Final = (1, TILES_FROM, MAX_DRAFT_STEP_TOKENS + 1)
"""Numbers of tokens from which the calls may be the same; the first one for which they are is used. Matmuls with
block-quantized weights use other kernels below, see `load._tiles_from`."""
_MIDDLE: Final = 1025
"""A number of tokens far from any border."""
NOT_PER_TOKEN: Final = "its arguments are not linear in the number of tokens"


class NoProgramError(Exception):
    """There is no program; the message says why."""


class StepSize(NamedTuple):
    """T and W of a step."""

    tokens: int
    num_logits: int

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.num_logits} with logits"


class Steps(NamedTuple):
    """The steps with T >= `least_tokens` and `least_logits` <= W <= `most_logits`."""

    least_tokens: int
    least_logits: int
    most_logits: int

    @classmethod
    def beside(cls, border: int) -> list[Self]:
        """All steps with T >= `border`, in two parts: W < `border`, and W >= `border`."""
        least_tokens = max(border, LEAST_TOKENS)
        steps = [cls(least_tokens, 1, border - 1), cls(least_tokens, border, MAX_TOKENS)]
        return [each for each in steps if each.most_logits]

    def include(self, size: StepSize) -> bool:
        """Whether a step of this size is one of them."""
        fits_logits = self.least_logits <= size.num_logits <= self.most_logits
        return self.least_tokens <= size.tokens <= MAX_TOKENS and fits_logits

    @property
    def largest(self) -> StepSize:
        """The size that needs the most memory."""
        return StepSize(MAX_TOKENS, self.most_logits)

    def tried(self) -> list[StepSize]:
        """The sizes for which the model is traced, besides the largest."""
        tokens = sorted({self.least_tokens, self.least_tokens + 1, *BORDERS, _MIDDLE})
        tried = [StepSize(number, min(number, self.most_logits)) for number in tokens]
        middle = (self.least_logits + min(self.most_logits, _MIDDLE)) // 2
        tried += [StepSize(_MIDDLE, self.least_logits + 1), StepSize(_MIDDLE, middle)]
        return [size for size in tried if self.include(size)]


class Planes(NamedTuple):
    """Arguments of all calls: `constants` + `by_token` * T + `by_logits` * W."""

    constants: Words
    by_token: Words
    by_logits: Words

    @classmethod
    def through(cls, steps: Steps, words_of: Callable[[StepSize], Words]) -> Self:
        """The planes through the arguments of three sizes.

        Raises:
            NoProgramError: their coefficients are not integers.
        """
        tokens, num_logits = steps.least_tokens, steps.least_logits
        corner, edge, most = map(
            words_of, (StepSize(tokens, num_logits), StepSize(MAX_TOKENS, num_logits), steps.largest)
        )
        by_token, token_rest = np.divmod(edge - corner, MAX_TOKENS - tokens)
        by_logits, logits_rest = np.divmod(most - edge, steps.most_logits - num_logits)
        if token_rest.any() or logits_rest.any():
            raise NoProgramError(NOT_PER_TOKEN)
        return cls(corner - by_token * tokens - by_logits * num_logits, by_token, by_logits)

    def at(self, size: StepSize) -> Words:
        """The arguments of a step."""
        return self.constants + self.by_token * size.tokens + self.by_logits * size.num_logits

    def changing(self) -> Words:
        """Indices of the arguments that depend on the size."""
        return np.flatnonzero((self.by_token != 0) | (self.by_logits != 0))

    def of(self, which: Words) -> Self:
        """The planes of some of the arguments."""
        return type(self)(*(column[which] for column in self))
