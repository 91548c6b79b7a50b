"""`PrefillAdder`: decides for one pass which waiting requests start, and how much of their prompts is computed.

Made anew for each pass, from the memory as it is then: there is no "batch is full" that somebody must remember to
clear. It locks the cached prefixes of those it admits and counts; rows and pages are taken afterwards, when all locks
are in place, so that making room for one cannot evict the prefix of the next.
"""

from __future__ import annotations

from typing import NamedTuple

from ..runtime.feasibility import pages_for
from .budget import CLIP_MAX_NEW_TOKENS, PrefillBudget
from .kv_memory import KVMemory
from .req import Req
from .verdict import AddReqResult, Reason, Verdict


class Chunk(NamedTuple):
    """A run of prompt tokens that the step computes.

    Attributes:
        req: whose.
        start: position of the first token.
        length: how many.
        is_first: the request was admitted in this pass.
        is_last: the prompt ends here, a token is sampled.
    """

    req: Req
    start: int
    length: int
    is_first: bool
    is_last: bool


class PrefillAdder:
    """One pass of admissions.

    Attributes:
        chunks: what was admitted, in order.
        budget: what is left.
    """

    __slots__ = ("_kv", "_max_partial", "_nothing_runs", "_num_free_rows", "_num_partial", "budget", "chunks")

    def __init__(
        self,
        kv: KVMemory,
        budget: PrefillBudget,
        *,
        num_free_rows: int,
        max_partial: int,
        nothing_runs: bool,
    ) -> None:
        """`nothing_runs`: no request has a row, so whatever fits at all must be admitted."""
        self._kv = kv
        self.budget = budget
        self.chunks: list[Chunk] = []
        self._num_free_rows = num_free_rows
        self._max_partial = max_partial
        self._num_partial = 0
        self._nothing_runs = nothing_runs

    def exhausted(self) -> Reason | None:
        """Why nobody else can be admitted in this pass; None while somebody might."""
        budget = self.budget
        if not self._num_free_rows:
            return Reason.NO_ROW
        if budget.rem_chunk_tokens <= 0:
            return Reason.CHUNK_BUDGET
        if budget.rem_input_tokens <= 0:
            return Reason.INPUT_BUDGET
        if min(budget.rem_total_tokens, budget.cur_rem_tokens) <= 0 and not self._alone:
            return Reason.NO_KV
        return None

    def continue_chunk(self, req: Req, num_computed: int) -> Verdict:
        """Go on with a prompt that was cut; comes before all waiting requests.

        It takes what the step's decodes have left, in whole pages, and progresses whenever a page can be had. When
        none can, the decodes decide within a page: one finishes, or memory runs out and this request, which has the
        least work to lose, is the one retracted.
        """
        page_size = self._kv.page_size
        remaining = req.fill_len - num_computed
        have = min(self.budget.rem_step_tokens, self.budget.cur_rem_tokens)
        is_last = remaining <= have
        length = remaining if is_last else have // page_size * page_size
        self._num_partial += not is_last
        if length <= 0:
            return Verdict(
                req.rid, AddReqResult.NO_TOKEN, Reason.NO_KV, num_computed, remaining, 0, page_size, have
            )
        self.budget.reserve_promised(length)
        self.chunks.append(Chunk(req, num_computed, length, is_first=False, is_last=is_last))
        reason = Reason.CHUNK_CONTINUED
        return Verdict(req.rid, AddReqResult.CONTINUE, reason, num_computed, length, 0, remaining, have)

    def add(self, req: Req) -> Verdict:
        """Admit a waiting request or say why not. Call only while `exhausted` is None."""
        kv, budget = self._kv, self.budget
        match = kv.match(req)
        prefix_len = match.num_pages * kv.page_size
        extend_len = req.fill_len - prefix_len
        output_len = _expected_output(req)
        pinned = kv.unlocked_pages(match) * kv.page_size
        if self._alone:
            need = pages_for(req.max_kv_len, kv.page_size) * kv.page_size - prefix_len
            have = budget.cur_rem_tokens - pinned
            enough = need <= have
        else:
            need = extend_len + output_len + kv.page_size
            have = budget.rem_total_tokens - pinned
            enough = need < have
        if not enough:
            no_token = AddReqResult.NO_TOKEN
            return Verdict(req.rid, no_token, Reason.NO_KV, prefix_len, extend_len, output_len, need, have)

        length, refusal = self._cut(extend_len)
        if refusal is not None:
            have = budget.rem_step_tokens
            return Verdict(req.rid, AddReqResult.OTHER, refusal, prefix_len, extend_len, 0, extend_len, have)
        is_last = length == extend_len
        reason = Reason.ADMITTED_ALONE if self._alone else Reason.ADMITTED
        if not is_last:
            reason = Reason.CHUNKED
            self._num_partial += 1
        kv.lock(req, match)
        budget.pin(pinned)
        budget.reserve(length, extend_len - length + output_len)
        self._num_free_rows -= 1
        self.chunks.append(Chunk(req, prefix_len, length, is_first=True, is_last=is_last))
        return Verdict(req.rid, AddReqResult.CONTINUE, reason, prefix_len, length, output_len, need, have)

    @property
    def _alone(self) -> bool:
        """Nothing runs and nothing was admitted: the estimate of the future is replaced by the exact worst case.

        The estimate is cautious in its own way (clipped output, a page for rounding, strictly less) and may refuse for
        ever what `fits` has accepted; the worst case of a request that is alone cannot.
        """
        return self._nothing_runs and not self.chunks

    def _cut(self, extend_len: int) -> tuple[int, Reason | None]:
        """How much of a prompt this step computes; the end of a cut is page aligned, since the prefix is."""
        limit = self.budget.rem_step_tokens
        if extend_len <= limit:
            return extend_len, None
        if not self.budget.cuts_prompts:
            # never cut: a prompt larger than the step's budget gets a step of its own
            return (extend_len, None) if not self.chunks else (0, Reason.INPUT_BUDGET)
        if self._num_partial >= self._max_partial:
            return 0, Reason.PARTIAL_LIMIT
        length = limit // self._kv.page_size * self._kv.page_size
        return (length, None) if length > 0 else (0, Reason.CHUNK_BUDGET)


def _expected_output(req: Req) -> int:
    return min(req.max_new_tokens - req.output_len, CLIP_MAX_NEW_TOKENS)
