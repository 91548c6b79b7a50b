"""The figures of a pass for the decision log: its token budget and its predicted step time."""

from __future__ import annotations

from typing import NamedTuple


class BudgetState(NamedTuple):
    """The four figures of the prefill budget at one time, in tokens."""

    rem_total_tokens: int
    cur_rem_tokens: int
    rem_input_tokens: int
    rem_chunk_tokens: int


class StepTime(NamedTuple):
    """The predicted times of a pass's step.

    Attributes:
        target_s: the configured step time.
        decodes_s: time of the running requests alone.
        waiting_s: time of all waiting prompts, if they were computed now.
        prompts_s: time that prompts may take in this step.
        left_s: the unused part of that after the pass; below 0 if one page alone takes longer.
        token_s: time of a prompt token without attention; 0 while no prompt has been measured: then no prompt is cut.
    """

    target_s: float
    decodes_s: float
    waiting_s: float
    prompts_s: float
    left_s: float
    token_s: float

    def text(self) -> str:
        """The times as one line of text."""
        ms = 1000.0
        return (
            f"target {self.target_s * ms:.1f} ms: decodes {self.decodes_s * ms:.1f} ms; of waiting prompts, which take "
            f"{self.waiting_s * ms:,.0f} ms, at most {self.prompts_s * ms:.1f} ms ({self.left_s * ms:.1f} ms left; "
            f"{self.token_s * ms:.3f} ms per token)"
        )
