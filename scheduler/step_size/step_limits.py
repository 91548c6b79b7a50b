"""`StepLimits`: the limits of the prefill half of a step, taken from the configuration once."""

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
        decodes_first: under that limit, prompts get only the tokens that the decodes do not use, possibly none.
        partial: how the step is shared among prompts that are cut.
        look_ahead: how many requests after one that lacks memory are tried; each costs a prefix cache look-up.
        num_lookahead_tokens: slots that each request has ready for draft tokens.
        target_step_ms: time target of a step in which requests decode; 0: none. See `StepTarget`.
        decode_burst_ms: time limit of a multi-step decode; 0: none. See `MultiStepDecode`.
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
        """The limits with at most `max_step_tokens` in a step; prompts are then cut, even if they were not before."""
        if max_step_tokens is None:
            return self
        return self._replace(
            chunk_size=min(self.chunk_size or max_step_tokens, max_step_tokens),
            max_prefill_tokens=min(self.max_prefill_tokens, max_step_tokens),
        )

    def largest_prefill(self, page_size: int, max_model_len: int) -> int:
        """Tokens of the largest step that computes prompts; at least a page."""
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
            # both are "auto" in logs that are older than the setting
            target_step_ms=0.0 if config.target_step_ms == "auto" else config.target_step_ms,
            decode_burst_ms=0.0 if config.decode_burst_ms == "auto" else config.decode_burst_ms,
        )
