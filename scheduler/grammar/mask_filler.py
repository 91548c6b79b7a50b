"""`MaskFiller`: the token masks of one step; `StepMasks`: the same, as the runner asks for them."""

# Shapes: B requests in the batch, S that sample, R rows of logits (S plus the drafts), W words of a mask.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from ...grammar.backend import Matcher
from ...runtime.step_plan import TokenMasks
from ..batch import ScheduleBatch
from ..memory.req_to_token_pool import ReqToTokenPool
from ..records.decision_log import RefusedToken
from ..requests.req import Req

Clock = Callable[[], float]
"""The time in seconds."""


def no_clock() -> float:
    """A `Clock` for callers that measure nothing."""
    return 0.0


class _GuidedRows(NamedTuple):
    """The rows of logits of one request.

    Attributes:
        batch_idx: the request in the batch.
        first: its first row of logits; one per draft follows.
        draft_ids: its drafts, up to the first one that the matcher refuses.
        req, matcher: the request, and its matcher before the drafts.
    """

    batch_idx: int
    first: int
    draft_ids: list[int]
    req: Req
    matcher: Matcher


class _MaskedRow(NamedTuple):
    """A row of logits with a mask: the `offset`-th row of its request."""

    rows: _GuidedRows
    offset: int


class MaskFiller:
    """Fills masks into one array, which the next call overwrites.

    The matchers are asked one after the other: with the thread pool of the library a step took 3 to 5 times as long
    beside the model's OpenMP threads (docs/performance.md). All tokens before the step must be settled.
    """

    def __init__(self, vocab_size: int, pool: ReqToTokenPool) -> None:
        self._pool = pool
        self._masked: list[_MaskedRow] = []  # of the last masks
        self._num_words = -(-vocab_size // 32)
        self._bits = np.empty((0, self._num_words), dtype=np.int32)

    def fill(self, batch: ScheduleBatch, clock: Clock = no_clock) -> TokenMasks | None:
        """The masks of all rows of logits, drafts included; None if no row is constrained.

        Args:
            batch: of the step.
            clock: called to measure the time of each request, which its figures get.
        """
        for rows in self._measured(batch, clock):
            self._fill_rows(rows, 0, rows.matcher)
        return self._masks()

    def fill_unchecked(self, batch: ScheduleBatch, clock: Clock = no_clock) -> TokenMasks | None:
        """The masks of the rows whose token cannot be checked after sampling."""
        for rows in self._measured(batch, clock):
            if not rows.req.is_checked_late:
                self._fill_rows(rows, 0, rows.matcher)
        return self._masks()

    def fill_refused(
        self,
        batch: ScheduleBatch,
        token_ids: npt.NDArray[np.int64],
        refused: list[RefusedToken],
        clock: Clock = no_clock,
    ) -> TokenMasks | None:
        """The masks of the other rows whose token is not allowed.

        After a draft that is not the token of its row, the rows of a request do not count, and are not checked. After
        a row that is sampled again they may count, so all of them have masks.

        Args:
            batch: of the step.
            token_ids: [R] the token of each row of logits.
            refused: the tokens that are not allowed are appended, also those of rows that may count.
            clock: see `fill`.
        """
        for rows in self._measured(batch, clock):
            if rows.req.is_checked_late:
                start = len(self._masked)
                self._fill_if_refused(rows, token_ids)
                self._find_refused(
                    start, [int(token_ids[r.first + k]) for r, k in self._masked[start:]], refused
                )
        return self._masks()

    def find_refused(self, token_ids: Sequence[int], refused: list[RefusedToken]) -> None:
        """Append the tokens, one for each row of the last masks, that their masks do not allow."""
        self._find_refused(0, token_ids, refused)

    def _find_refused(self, start: int, token_ids: Sequence[int], refused: list[RefusedToken]) -> None:
        for index, token_id in enumerate(token_ids, start=start):
            bits = self._bits[index]
            is_allowed = int(bits[token_id // 32]) >> token_id % 32 & 1
            rows, offset = self._masked[index]
            if not is_allowed and not _is_other_split(rows, offset, token_id):
                refused.append(RefusedToken(rows.batch_idx, offset, token_id))

    def _fill_if_refused(self, rows: _GuidedRows, token_ids: npt.NDArray[np.int64]) -> None:
        matcher = rows.matcher
        for k in range(len(rows.draft_ids) + 1):
            token_id = int(token_ids[rows.first + k])
            if matcher.wants_mask and not matcher.allows(token_id):
                self._fill_rows(rows, k, matcher)
                return
            if k == len(rows.draft_ids) or token_id != rows.draft_ids[k]:
                return
            if matcher is rows.matcher:
                matcher = matcher.copy()
            matcher.accept((token_id,))
            if matcher.ended or matcher.error:
                return

    def _fill_rows(self, rows: _GuidedRows, offset: int, matcher: Matcher) -> None:
        """Fill the masks of a request's rows from the `offset`-th on; `matcher`: its state there."""
        start, draft_ids = len(self._masked), rows.draft_ids[offset:]
        if draft_ids:
            num_rows = 1 + len(draft_ids)
            matcher.fill_drafts(draft_ids, self._bits[start : start + num_rows])
            self._masked += [_MaskedRow(rows, offset + k) for k in range(num_rows)]
        elif matcher.wants_mask:
            matcher.fill(self._bits[start])
            self._masked.append(_MaskedRow(rows, offset))

    def _measured(self, batch: ScheduleBatch, clock: Clock) -> Iterator[_GuidedRows]:
        """`_guided`; the time until the next one is requested is that of the request. Begins new masks."""
        self._masked = []
        begin_s = clock()
        for rows in self._guided(batch):
            yield rows
            end_s = clock()
            if rows.req.grammar_figures is not None:
                rows.req.grammar_figures.mask_s += end_s - begin_s
            begin_s = end_s

    def _guided(self, batch: ScheduleBatch) -> Iterator[_GuidedRows]:
        """The rows with a grammar that goes on; the tokens of requests that left their row are dropped."""
        drafts = np.frombuffer(batch.plan.draft_ids, dtype=np.int32).tolist()
        num_drafts = np.frombuffer(batch.plan.num_drafts, dtype=np.int32).tolist()
        self._reserve(len(batch.sampled) + len(drafts))
        here = batch.still_here(self._pool)
        first_draft = 0
        for idx, batch_idx in enumerate(batch.sampled.tolist()):
            count = num_drafts[batch_idx] if num_drafts else 0
            req = batch.reqs[batch_idx]
            matcher = req.matcher
            if matcher is not None and here[batch_idx] and not matcher.ended and not matcher.error:
                if req.ends_reasoning and matcher.end_reasoning():
                    req.ends_reasoning = False
                draft_ids = drafts[first_draft : first_draft + count]
                if draft_ids:  # those of the runner may be any
                    draft_ids = draft_ids[: matcher.validate(draft_ids)]
                yield _GuidedRows(int(batch_idx), idx + first_draft, draft_ids, req, matcher)
            first_draft += count

    def _masks(self) -> TokenMasks | None:
        if not self._masked:
            return None
        indices = [rows.first + offset for rows, offset in self._masked]
        return TokenMasks(np.array(indices, dtype=np.int64), self._bits[: len(indices)])

    def _reserve(self, num_rows: int) -> None:
        if num_rows > len(self._bits):
            self._bits = np.empty((2 * num_rows, self._num_words), dtype=np.int32)


def _is_other_split(rows: _GuidedRows, offset: int, token_id: int) -> bool:
    """Whether a token that no mask allows is the beginning of a text that the grammar allows.

    Where only one text may follow, a mask has only the tokenizer's split of it. The text is the same either way.
    """
    matcher = rows.matcher
    if offset:
        matcher = matcher.copy()
        matcher.accept(rows.draft_ids[:offset])
    # `allows` of a refused token tells a matcher that cuts answers that it was the model's token.
    return matcher.validate((token_id,)) == 1 or matcher.allows(token_id)


class MaskMeter:
    """Counts masks, and measures the time of the matchers, also for tokens that needed no mask.

    Attributes:
        num_masks, seconds: totals.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.num_masks, self.seconds = 0, 0.0

    def measured(self, fill: Callable[[Clock], TokenMasks | None]) -> TokenMasks | None:
        """The result of `fill`, which gets the clock."""
        begin_s = self._clock()
        masks = fill(self._clock)
        self.seconds += self._clock() - begin_s
        self.num_masks += 0 if masks is None else len(masks.indices)
        return masks


class StepMasks:
    """A `GetMasks`.

    Attributes:
        refused: see `Settled`; complete when the result of the step is there.
    """

    __slots__ = ("_batch", "_filler", "_meter", "_num_rounds", "_settle_earlier", "refused")

    def __init__(
        self, filler: MaskFiller, batch: ScheduleBatch, settle_earlier: Callable[[], None], meter: MaskMeter
    ) -> None:
        """Take the parts.

        Args:
            filler: of the scheduler.
            batch: of the step.
            settle_earlier: settles all steps before it: the masks depend on their tokens.
            meter: of all steps.
        """
        self._filler = filler
        self._batch = batch
        self._settle_earlier = settle_earlier
        self._meter = meter
        self._num_rounds = 0  # of a multi-step decode, that have begun
        self.refused: list[RefusedToken] = []

    def __call__(self) -> TokenMasks | None:
        self._settle_earlier()
        self._num_rounds += 1
        return self._meter.measured(lambda clock: self._filler.fill(self._batch, clock))

    def before(self) -> TokenMasks | None:
        self._settle_earlier()
        self._num_rounds += 1
        return self._meter.measured(lambda clock: self._filler.fill_unchecked(self._batch, clock))

    def drafted(self, draft_ids: bytes) -> None:
        self._batch = replace(self._batch, plan=replace(self._batch.plan, draft_ids=draft_ids))

    def unmasked(self, token_ids: npt.NDArray[np.int64]) -> None:
        found: list[RefusedToken] = []
        self._filler.find_refused(token_ids.tolist(), found)
        self._add(found)

    def after(self, token_ids: npt.NDArray[np.int64]) -> TokenMasks | None:
        found: list[RefusedToken] = []
        masks = self._meter.measured(
            lambda clock: self._filler.fill_refused(self._batch, token_ids, found, clock)
        )
        self._add(found)
        return masks

    def _add(self, found: list[RefusedToken]) -> None:
        """Rounds after the first one follow its token; they have no drafts."""
        done = self._num_rounds - 1
        self.refused += [each._replace(offset=done) for each in found] if done else found
