"""`ForcedSpeculation`: `--speculative off`, where forced tokens of grammars are still drafts.

A request whose grammar allows only one text gets its tokens as drafts, and verifies all of them in one step
(`grammar_drafts.py`). No hit rate has to be learned. With `--speculative ngram`, `NgramSpeculation` does the same.

Steps with drafts have no inner steps (`multi_step.py`). Inner steps save the work between steps, about a fifth of a
step of a small model on a CPU, while a draft saves its request a whole step. So where multi-step decodes are on, a step
has drafts if there is at least one per four requests.

The cases without drafts are those of `speculation.py`. With overlap there are none: the next step is planned before the
number of tokens of this one is known.
"""

from __future__ import annotations

from typing import Final

from ...runtime.step_plan import MAX_DRAFT_STEP_TOKENS
from ..batch import ScheduleBatch
from ..grammar.grammar_drafts import GrammarDrafts
from ..memory.row_memory import RowMemory
from ..phases import Work
from ..requests.req import Req
from ..step_size.step_caps import StepCaps
from ..step_size.step_limits import StepLimits
from .draft_memory import DraftMemory
from .drafts import NO_DRAFTS, Drafts, drafts_of
from .eligibility import may_speculate

_REQS_PER_DRAFT: Final = 4
"""With multi-step decodes: most requests of a step per draft of it."""


class ForcedSpeculation:
    """A `Speculation`; see the module."""

    def __init__(
        self, *, limits: StepLimits, memory: RowMemory, caps: StepCaps, grammar_drafts: GrammarDrafts
    ) -> None:
        self._max_step_tokens = min(
            MAX_DRAFT_STEP_TOKENS, limits.max_num_batched_tokens or MAX_DRAFT_STEP_TOKENS
        )
        self._has_inner_steps = limits.decode_burst_ms > 0
        self._memory = DraftMemory(memory)
        self._caps = caps
        self._grammar_drafts = grammar_drafts

    def plan(self, work: Work) -> Drafts:
        """A step without a grammar costs one array look-up."""
        reqs = work.decode_reqs
        left = self._max_step_tokens - len(reqs)
        if work.chunks or not reqs or left <= 0 or self._caps.are_lowered:
            return NO_DRAFTS
        if not self._grammar_drafts.concerns(work.decode_rows):
            return NO_DRAFTS
        proposed: list[list[int]] = []
        for req in reqs:
            token_ids: list[int] = []
            if left and req.matcher is not None and may_speculate(req):
                token_ids, _ = self._grammar_drafts.propose(req, min(left, self._memory.room(req)))
                left -= len(token_ids)
            proposed.append(token_ids)
        num_drafts = sum(map(len, proposed))
        if not num_drafts or (self._has_inner_steps and num_drafts * _REQS_PER_DRAFT < len(reqs)):
            return NO_DRAFTS
        counts = self._memory.take_pages(reqs, [len(token_ids) for token_ids in proposed])
        return drafts_of([token_ids[:count] for token_ids, count in zip(proposed, counts, strict=True)])

    def needs_result(self, batch: ScheduleBatch) -> bool:
        return batch.num_drafts > 0

    def measured(self, num_reqs: int, num_drafts: int, seconds: float) -> None:
        pass

    def started(self, req: Req) -> None:
        pass

    def stopped(self, req: Req) -> None:
        pass
