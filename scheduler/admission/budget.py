"""`PrefillBudget`: how much prefill one pass may still admit, in KV memory and in computing."""

from __future__ import annotations

import math

from ..records.pass_figures import BudgetState
from ..step_size.prompt_time import UNLIMITED, PromptTime


class PrefillBudget:
    """Tokens that may still be reserved in this pass (sglang:mem_cache/prefill_budget.py).

    Attributes:
        rem_total_tokens: available KV memory less what was reserved: the expected output of the running requests,
            and the rest of the prompts in the middle of their chunks with their expected output.
        cur_rem_tokens: available KV memory as it is now.
        rem_input_tokens: prompt tokens the step may still compute.
        rem_chunk_tokens: the same by the chunk size; `UNLIMITED` when prompts are never cut.
        cuts_prompts: whether a prompt may be computed in several steps.
        allows_oversized: whether a prompt that is never cut may have a step to itself that it does not fit into.
        time: what the step's prompts may take, in seconds; see `StepTarget`.

    The pages of the decodes that ride along have been taken before the pass and are missing from the memory already;
    SGLang subtracts them here. Of the limits on prompts they leave at least a page, so that many running requests
    cannot keep every prompt out; for the limit on all tokens of a step see `decodes_first`.

    Different from SGLang, too: a prompt that is cut is reserved all of its memory when it is admitted. SGLang counts
    the chunk alone, so requests behind it take what its other chunks need, and it, with the least work to lose, is
    retracted again and again.
    """

    __slots__ = (
        "allows_oversized",
        "cur_rem_tokens",
        "cuts_prompts",
        "page_size",
        "rem_chunk_tokens",
        "rem_input_tokens",
        "rem_total_tokens",
        "time",
    )

    def __init__(
        self,
        *,
        page_size: int,
        available_tokens: int,
        expected_tokens: float,
        max_prefill_tokens: int,
        chunk_size: int | None,
        num_decodes: int,
        max_num_batched_tokens: int | None = None,
        decodes_first: bool = False,
        time: PromptTime | None = None,
    ) -> None:
        """Start a pass.

        Args:
            available_tokens: KV slots that are free or can be evicted.
            expected_tokens: slots reserved to the requests with a row.
            max_prefill_tokens: prompt tokens of a step.
            chunk_size: the same where prompts are cut; None where they are not.
            num_decodes: running requests that compute a token each in the same step.
            max_num_batched_tokens: tokens of a step, prompts and decodes; None for no such limit. It is a further bound
                on `rem_input_tokens`.
            decodes_first: under that limit prompts get what the decodes leave, and be it nothing, as in vLLM V1: the
                step never has more tokens, whatever waits, and prompts go on as running requests end. Otherwise they
                get a page of each step even then, so that the first token of a new request cannot be put off for as
                long as the others run. A step without decodes always has room for a page: smaller limits than that
                would stop the engine for good.
            time: what prompts may take; as long as they need unless given.
        """
        self.time = time if time is not None else PromptTime.unlimited()
        self.page_size = page_size
        self.cur_rem_tokens = available_tokens
        self.rem_total_tokens = available_tokens - math.ceil(expected_tokens)
        self.cuts_prompts = chunk_size is not None
        self.rem_chunk_tokens = UNLIMITED if chunk_size is None else max(chunk_size - num_decodes, page_size)
        self.rem_input_tokens = max(max_prefill_tokens - num_decodes, page_size)
        self.allows_oversized = True
        if max_num_batched_tokens is not None:
            nothing_left = decodes_first and num_decodes > 0
            least = 0 if nothing_left else page_size
            self.rem_input_tokens = min(
                self.rem_input_tokens, max(max_num_batched_tokens - num_decodes, least)
            )
            self.allows_oversized = not nothing_left

    def state(self) -> BudgetState:
        """A copy of the figures."""
        return BudgetState(
            self.rem_total_tokens, self.cur_rem_tokens, self.rem_input_tokens, self.rem_chunk_tokens
        )

    @property
    def rem_step_tokens(self) -> int:
        """Tokens that this step may still compute."""
        return min(self.rem_input_tokens, self.rem_chunk_tokens)

    def pin(self, num_tokens: int) -> None:
        """A cached prefix was locked: so many tokens stopped being evictable."""
        self.rem_total_tokens -= num_tokens
        self.cur_rem_tokens -= num_tokens

    def reserve(self, extend_len: int, later_len: int, restored_len: int = 0) -> None:
        """Count an admission: whole pages for what it gets now, one page for rounding, and what comes later.

        Args:
            extend_len: prompt tokens that the step computes.
            later_len: the rest of the prompt and the expected output.
            restored_len: tokens before those that take memory and no computing: their KV is copied.
        """
        self.rem_total_tokens -= self._take(extend_len, restored_len) + later_len

    def take_reserved(self, extend_len: int) -> None:
        """Count a further chunk of a prompt; `expected_tokens` has all of it already."""
        self._take(extend_len, 0)

    def extend(self, extra_len: int) -> None:
        """Count that a chunk of this pass, which ends at a page, is made longer; its memory is reserved already."""
        self.cur_rem_tokens -= -(-extra_len // self.page_size) * self.page_size
        self._compute(extra_len)

    def give_back(self, available_tokens: int, expected_tokens: int) -> None:
        """Count what requests leave behind that were retracted during the pass.

        Args:
            available_tokens: KV slots that became free or evictable.
            expected_tokens: how much was reserved to them beyond those.
        """
        self.cur_rem_tokens += available_tokens
        self.rem_total_tokens += available_tokens + expected_tokens

    def _take(self, extend_len: int, restored_len: int) -> int:
        tokens = -(-(restored_len + extend_len) // self.page_size) * self.page_size + self.page_size
        self.cur_rem_tokens -= tokens
        self._compute(extend_len)
        return tokens

    def _compute(self, num_tokens: int) -> None:
        self.rem_input_tokens -= num_tokens
        self.rem_chunk_tokens -= num_tokens
