"""`StepLimits`: what bounds the prefill half of a step, taken from the configuration once."""

from __future__ import annotations

from typing import NamedTuple, Self

from ...runtime.config.engine_config import SchedulerConfig
from .partial_prefills import PartialLimits


class StepLimits(NamedTuple):
    """Limits of a step.

    Attributes:
        chunk_size: prompt tokens per step; None: prompts are never cut.
        max_prefill_tokens: prompt tokens per step, cut or not.
        max_num_batched_tokens: tokens per step, decodes included; None: no such limit.
        decodes_first: under that limit, prompts get what the decodes leave, and be it nothing.
        partial: how the step is shared among prompts that are cut.
        look_ahead: how many requests behind one that lacks memory are tried; each costs a look into the prefix cache.
        num_lookahead_tokens: slots that each request keeps ready for draft tokens.
        target_step_ms: time of a step in which requests decode; 0: none. See `StepTarget`.
        decode_burst_ms: see `MultiStepDecode`; 0: none.
    """

    chunk_size: int | None
    max_prefill_tokens: int
    max_num_batched_tokens: int | None
    decodes_first: bool
    partial: PartialLimits
    look_ahead: int
    num_lookahead_tokens: int
    target_step_ms: float = 0.0
    decode_burst_ms: float = 0.0

    def capped(self, max_step_tokens: int | None) -> Self:
        """With no more tokens in a step than this: prompts are cut, if they were not before."""
        if max_step_tokens is None:
            return self
        return self._replace(
            chunk_size=min(self.chunk_size or max_step_tokens, max_step_tokens),
            max_prefill_tokens=min(self.max_prefill_tokens, max_step_tokens),
        )

    def largest_prefill(self, page_size: int, max_model_len: int) -> int:
        """Tokens of the largest step that computes prompts; a page of one is always computed."""
        if self.chunk_size is None:
            return max(self.max_prefill_tokens, max_model_len)
        return max(min(self.max_prefill_tokens, self.chunk_size), page_size)

    @classmethod
    def of(cls, config: SchedulerConfig) -> Self:
        """The limits that a resolved configuration sets."""
        assert isinstance(config.chunked_prefill_size, int), "the configuration is not resolved"
        return cls(
            chunk_size=None if config.chunked_prefill_size == -1 else config.chunked_prefill_size,
            max_prefill_tokens=config.max_prefill_tokens,
            max_num_batched_tokens=config.max_num_batched_tokens,
            decodes_first=config.phases == "decode-first",
            partial=PartialLimits.of(config),
            look_ahead=config.look_ahead,
            num_lookahead_tokens=config.num_lookahead_tokens,
            # both unresolved in logs that are older than the setting
            target_step_ms=0.0 if config.target_step_ms == "auto" else config.target_step_ms,
            decode_burst_ms=0.0 if config.decode_burst_ms == "auto" else config.decode_burst_ms,
        )
