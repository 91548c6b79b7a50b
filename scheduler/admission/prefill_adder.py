"""`PrefillAdder`: decides for one pass which waiting requests start, and how much of their prompts is computed.

Each pass makes a new one from the current state of memory, so there is no "batch is full" flag to clear. It locks the
cached prefixes of admitted requests and counts tokens. Rows and pages are taken afterwards, when all locks are held, so
that an eviction for one request cannot remove the prefix of the next.
"""

from __future__ import annotations

from ...runtime.feasibility import pages_for
from ..estimator import OutputEstimator
from ..media.tile_budget import TileBudget
from ..memory.kv_memory import KVMemory
from ..prefix_cache.base import Prefix
from ..records.verdict import AddReqResult, Reason, Verdict
from ..requests.req import Chunk, Req, ReqStatus
from ..step_size.step_limits import PartialPrefills
from .budget import PrefillBudget


class PrefillAdder:
    """One pass of admissions.

    Attributes:
        chunks: admitted chunks, in order.
        budget: the remaining budget of the pass.
    """

    __slots__ = (
        "_estimator",
        "_kv",
        "_num_free_rows",
        "_num_lookahead_tokens",
        "_num_running",
        "_partial",
        "_tiles",
        "_verdicts",
        "budget",
        "chunks",
    )

    def __init__(
        self,
        kv: KVMemory,
        budget: PrefillBudget,
        *,
        num_free_rows: int,
        num_running: int,
        estimator: OutputEstimator,
        partial_prefills: PartialPrefills,
        tiles: TileBudget,
        num_lookahead_tokens: int = 0,
    ) -> None:
        """Start a pass.

        Args:
            kv: what the cache has, and where it is locked.
            budget: of this pass.
            num_free_rows: requests that may be added to those that run.
            num_running: requests with a row; if there are none, every feasible request must be admitted.
            estimator: how many tokens are reserved for the output of a candidate.
            partial_prefills: how the step is shared among prompts.
            tiles: which tiles of images the step may encode.
            num_lookahead_tokens: slots that each request has ready beyond its next token, for draft tokens.
        """
        self._kv = kv
        self.budget = budget
        self.chunks: list[Chunk] = []
        self._verdicts: list[Verdict] = []  # of each chunk
        self._num_free_rows = num_free_rows
        self._num_running = num_running
        self._estimator = estimator
        self._partial = partial_prefills
        self._tiles = tiles
        self._num_lookahead_tokens = num_lookahead_tokens

    def exhausted(self, *, may_preempt: bool = False) -> Reason | None:
        """Reason why no other request can be admitted in this pass; None while one may be.

        Args:
            may_preempt: candidates may preempt running requests, so rows and memory are never a reason.
        """
        budget = self.budget
        if budget.rem_step_tokens <= 0:
            return self._spent_budget
        if budget.time.is_spent:
            return Reason.STEP_TIME
        if may_preempt:
            return None
        if not self.has_row:
            return Reason.NO_ROW
        if min(budget.rem_total_tokens, budget.cur_rem_tokens) <= 0 and not self._alone:
            return Reason.NO_KV
        return None

    def continue_chunk(self, req: Req, num_computed: int) -> Verdict:
        """Continue a partial prefill; all of them come before all waiting requests.

        It takes its share of the tokens that the step's decodes leave, in whole pages, and progresses whenever a page
        is available. If none is, the state changes within a page of decoding: a request finishes, or memory runs out
        and this request, which has the least work to lose, is retracted. Images that are computed whole take a step of
        their own if they are longer than all this.
        """
        budget = self.budget
        remaining = req.fill_len - num_computed
        limit, by_time = self._limit(req, num_computed)
        have = min(limit, budget.cur_rem_tokens)
        length = remaining if remaining <= have else self._whole_pages(req, num_computed, have)
        oversized = self._oversized(req, num_computed) if length <= 0 else 0
        is_ready = oversized > 0 and self._tiles.are_ready(req, num_computed, oversized)
        if is_ready and oversized <= budget.cur_rem_tokens:
            length = oversized
        self._partial.count(remaining, length)
        if length <= 0:
            page_size = self._kv.page_size
            self._tiles.ahead(req, num_computed)
            if self._whole_pages(req, num_computed, limit) > 0 or is_ready:
                result, reason = AddReqResult.NO_TOKEN, Reason.NO_KV
            elif oversized:
                result, reason = AddReqResult.OTHER, Reason.ENCODE_TIME
            else:
                result, reason = (
                    AddReqResult.OTHER,
                    self._reason_for_none(num_computed, limit, by_time=by_time),
                )
            return Verdict(req.rid, result, reason, num_computed, remaining, 0, page_size, have)
        budget.take_reserved(length)
        chunk = Chunk(req, num_computed, length, is_first=False, is_last=length == remaining)
        reason = self._reason(chunk, alone=False, by_time=by_time and have == limit)
        verdict = Verdict(req.rid, AddReqResult.CONTINUE, reason, num_computed, length, 0, remaining, have)
        return self._accept(chunk, verdict)

    def add(self, req: Req, prefix: Prefix) -> Verdict:
        """Admit a waiting request or say why not; a refusal changes nothing. Call only while `exhausted` is None.

        Args:
            prefix: what the request starts with. Ready tokens after the cached pages need memory but no computing.
        """
        kv, budget = self._kv, self.budget
        match, ready_len = prefix.match, prefix.ready_len
        match_len = match.num_pages * kv.page_size
        extend_len = req.fill_len - ready_len
        assert ready_len >= match_len and extend_len > 0, f"{req!r}: {ready_len} tokens ready"
        if budget.cuts_prompts and self._partial.too_many_long(extend_len):
            limit = self._partial.share
            reason = Reason.LONG_PARTIAL_LIMIT
            return Verdict(req.rid, AddReqResult.SKIP, reason, ready_len, extend_len, 0, extend_len, limit)

        output_len = self._kept_for_output(req)
        pinned = kv.unlocked_pages(match) * kv.page_size
        if self._alone:
            need = pages_for(req.max_kv_len, kv.page_size) * kv.page_size - match_len
            have = budget.cur_rem_tokens - pinned
            enough = need <= have
        else:
            need = self._need(req, match_len)
            have = budget.rem_total_tokens - pinned
            enough = need <= have
        if not enough:
            no_token = AddReqResult.NO_TOKEN
            return Verdict(req.rid, no_token, Reason.NO_KV, ready_len, extend_len, output_len, need, have)

        limit, by_time = self._limit(req, ready_len)
        length, refusal = self._cut(req, ready_len, extend_len)
        if refusal is not None:
            have = limit if by_time else budget.rem_step_tokens
            result = AddReqResult.OTHER
            if refusal is Reason.ENCODE_TIME:
                result = AddReqResult.SKIP
                self._tiles.ahead(req, ready_len)
            return Verdict(req.rid, result, refusal, ready_len, extend_len, 0, extend_len, have)
        chunk = Chunk(req, ready_len, length, is_first=True, is_last=length == extend_len)
        reason = self._reason(chunk, alone=self._alone, by_time=by_time)
        verdict = Verdict(req.rid, AddReqResult.CONTINUE, reason, ready_len, length, output_len, need, have)
        kv.lock(req, prefix)
        budget.pin(pinned)
        budget.reserve(length, extend_len - length + output_len, ready_len - match_len)
        self._partial.count(extend_len, length)
        self._num_free_rows -= 1
        return self._accept(chunk, verdict)

    @property
    def has_row(self) -> bool:
        """Whether there is a row for one more request."""
        return self._num_free_rows > 0

    def missing_tokens(self, req: Req, prefix: Prefix) -> int:
        """KV slots that are missing to admit this request; 0 or less if none are."""
        kv = self._kv
        need = self._need(req, prefix.match.num_pages * kv.page_size)
        return need + kv.unlocked_pages(prefix.match) * kv.page_size - self.budget.rem_total_tokens

    def can_compute(self, req: Req, prefix: Prefix) -> bool:
        """Whether this step could compute a part of its prompt, memory and rows aside."""
        extend_len = req.fill_len - prefix.ready_len
        if self.budget.rem_step_tokens <= 0 or self.budget.time.is_spent:
            return False
        if self.budget.cuts_prompts and self._partial.too_many_long(extend_len):
            return False
        return self._cut(req, prefix.ready_len, extend_len)[1] is None

    def use_leftover(self) -> list[Verdict]:
        """Extend cut prompts with the step's unused tokens; call at the end of the pass, before rows are taken.

        Some shares stay unused because memory is short or a request needs less. The prompt with the fewest remaining
        tokens is extended first, so that as many as possible get their first token.

        Returns:
            new verdicts of the extended prompts, which replace the earlier ones.
        """
        page_size, budget = self._kv.page_size, self.budget
        lacking = [
            (chunk.req.fill_len - chunk.start - chunk.length, idx)
            for idx, chunk in enumerate(self.chunks)
            if not chunk.is_last
        ]
        changed = []
        for remaining, idx in sorted(lacking):
            chunk = self.chunks[idx]
            end = chunk.start + chunk.length
            in_time = budget.time.most_tokens(end)
            have = min(budget.rem_step_tokens, budget.cur_rem_tokens, in_time)
            with_tiles = self._tiles.most_tokens(chunk.req, end, have)
            lacks_tiles = with_tiles < min(have, remaining)
            if lacks_tiles:
                have = in_time = with_tiles
            # chunks end at pages, so the extension takes whole pages; cur_rem_tokens is a multiple of the page size
            extra = remaining if remaining <= have else self._whole_pages(chunk.req, end, have)
            if extra <= 0 and (lacks_tiles or have >= page_size):
                continue  # the other prompts may need no tiles, or have no images that are computed whole
            if extra <= 0:
                break
            budget.extend(extra)
            self._tiles.spend(chunk.req, end, extra)
            budget.time.spend(end, extra)
            chunk = self.chunks[idx] = chunk._replace(length=chunk.length + extra, is_last=extra == remaining)
            reason = self._reason(chunk, alone=not self._num_running and not idx, by_time=have == in_time)
            verdict = self._verdicts[idx]._replace(reason=reason, extend_len=chunk.length)
            self._verdicts[idx] = verdict
            changed.append(verdict)
        return changed

    def add_capacity(self, available_tokens: int, expected_tokens: int, num_rows: int) -> None:
        """Count the memory and rows of running requests that were retracted for the next candidate.

        Args:
            available_tokens: KV slots that became free or evictable.
            expected_tokens: slots that the estimator had reserved for their output.
            num_rows: number of retracted requests.
        """
        self.budget.give_back(available_tokens, expected_tokens)
        self._num_free_rows += num_rows
        self._num_running -= num_rows

    def could_be_alone(self, num_retracted: int) -> bool:
        """Whether nothing would run, and nothing was admitted, if so many requests were retracted."""
        return self._num_running == num_retracted and not self.chunks

    @property
    def _alone(self) -> bool:
        """Nothing runs and nothing was admitted: the exact worst case replaces the estimate.

        The estimate has margins of its own (clipped output, a page for rounding, strictly less) and could refuse a
        feasible request forever. The worst case of a request that is alone cannot.
        """
        return not self._num_running and not self.chunks

    @property
    def _spent_budget(self) -> Reason:
        budget = self.budget
        by_chunk = budget.rem_chunk_tokens <= budget.rem_input_tokens
        return Reason.CHUNK_BUDGET if by_chunk else Reason.INPUT_BUDGET

    def _need(self, req: Req, match_len: int) -> int:
        """KV slots that must be available: tokens, expected output, a page for rounding, and one more as in SGLang."""
        return req.fill_len - match_len + self._kept_for_output(req) + self._kv.page_size + 1

    def _kept_for_output(self, req: Req) -> int:
        """The expected output plus the slots for draft tokens, at most what the request can ever use."""
        expected = self._estimator.expected_of(req)
        most = req.max_kv_len - req.fill_len
        return max(expected, min(expected + self._num_lookahead_tokens, most))

    def _limit(self, req: Req, start: int) -> tuple[int, bool]:
        """The most tokens from `start` on that a prompt may compute now, and whether time is the limit."""
        limit = self.budget.rem_step_tokens
        if self.budget.cuts_prompts:
            limit = min(limit, self._partial.share)
        in_time = self.budget.time.most_tokens(start)
        limit, by_time = min(limit, in_time), in_time <= limit
        if self.budget.cuts_prompts:
            with_tiles = self._tiles.most_tokens(req, start, limit)
            limit, by_time = with_tiles, by_time or with_tiles < limit
        return limit, by_time

    def _cut(self, req: Req, ready_len: int, extend_len: int) -> tuple[int, Reason | None]:
        """Number of prompt tokens that this step computes; a cut ends at a page."""
        limit, by_time = self._limit(req, ready_len)
        if extend_len <= limit:
            return extend_len, None
        if not self.budget.cuts_prompts:
            # a prompt larger than the step's budget gets a step of its own
            if not self.chunks and self.budget.allows_oversized:
                return extend_len, None
            return 0, Reason.STEP_TIME if by_time else Reason.INPUT_BUDGET
        if not self._partial.may_cut:
            lacks_tiles = by_time and limit < self.budget.time.most_tokens(ready_len)
            return 0, Reason.ENCODE_TIME if lacks_tiles else Reason.PARTIAL_LIMIT
        length = self._whole_pages(req, ready_len, limit)
        if length <= 0:
            length = self._oversized(req, ready_len)
            if not self._tiles.are_ready(req, ready_len, length):
                return 0, Reason.ENCODE_TIME
        if length > 0:
            return length, None
        return 0, self._reason_for_none(ready_len, limit, by_time=by_time)

    def _reason_for_none(self, start: int, limit: int, *, by_time: bool) -> Reason:
        """Reason why not even a page from `start` on can be computed; the arguments are the result of `_limit`."""
        if not by_time:
            return self._spent_budget
        return Reason.STEP_TIME if limit == self.budget.time.most_tokens(start) else Reason.ENCODE_TIME

    def _whole_pages(self, req: Req, start: int, limit: int) -> int:
        """The most tokens from `start` on, up to `limit`, that end at a page and in no image that is computed whole."""
        return req.last_cut(start + limit, self._kv.page_size) - start

    def _oversized(self, req: Req, start: int) -> int:
        """The least tokens from `start` on that can be computed, if images that are computed whole make them many.

        0: these are no more than a page, or the step has other prompts, or must not exceed its limit.
        """
        page_size = self._kv.page_size
        cut = req.next_cut(start, page_size)
        if cut == (start // page_size + 1) * page_size or self.chunks or not self.budget.allows_oversized:
            return 0
        return min(cut, req.fill_len) - start

    def _reason(self, chunk: Chunk, *, alone: bool, by_time: bool) -> Reason:
        """Reason why a chunk has its length; `by_time`: if it was cut, the time budget cut it."""
        if not chunk.is_first:
            cut_by_time = by_time and not chunk.is_last
            return Reason.CONTINUED_IN_TIME if cut_by_time else Reason.CHUNK_CONTINUED
        if chunk.req.status is ReqStatus.SWAPPED:
            return Reason.SWAPPED_IN
        if not chunk.is_last:
            return Reason.CHUNKED_IN_TIME if by_time else Reason.CHUNKED
        return Reason.ADMITTED_ALONE if alone else Reason.ADMITTED

    def _accept(self, chunk: Chunk, verdict: Verdict) -> Verdict:
        self._tiles.spend(chunk.req, chunk.start, chunk.length)
        self.budget.time.spend(chunk.start, chunk.length)
        self.chunks.append(chunk)
        self._verdicts.append(verdict)
        return verdict
