"""The figures of a pass for the decision log: its token budget and its predicted step time."""

from __future__ import annotations

from typing import NamedTuple


class BudgetState(NamedTuple):
    """The four figures at one moment, for the decision log; tokens."""

    rem_total_tokens: int
    cur_rem_tokens: int
    rem_input_tokens: int
    rem_chunk_tokens: int


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
