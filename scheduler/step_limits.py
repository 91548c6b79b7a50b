"""`StepLimits`: what bounds the prefill half of a step, taken from the configuration once."""

from __future__ import annotations

from typing import NamedTuple, Self

from ..runtime.config import SchedulerConfig


class StepLimits(NamedTuple):
    """Limits of a step.

    Attributes:
        chunk_size: prompt tokens per step; None: prompts are never cut.
        max_prefill_tokens: prompt tokens per step, cut or not.
        look_ahead: how many requests behind one that lacks memory are tried; each costs a look into the prefix cache.
    """

    chunk_size: int | None
    max_prefill_tokens: int
    look_ahead: int

    @classmethod
    def of(cls, config: SchedulerConfig) -> Self:
        """The limits that a resolved configuration sets."""
        assert isinstance(config.chunked_prefill_size, int), "the configuration is not resolved"
        return cls(
            chunk_size=None if config.chunked_prefill_size == -1 else config.chunked_prefill_size,
            max_prefill_tokens=config.max_prefill_tokens,
            look_ahead=config.look_ahead,
        )
