"""The matchers of the scheduler's requests.

`GuardedMatcher` turns an exception of a matcher into that matcher's error, so that it ends only its own request. Every
matcher of a running request is inside one; no other part of the scheduler expects a matcher to raise. The matcher comes
from a `MatcherSource`: `GrammarBuilder` in the server, `LoggedMatchers` in a replay.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ...grammar.backend import MaskRow, Matcher, MatcherErrorCode
from ...grammar.llguidance_matcher import PANIC_MODULE
from ..records.decision_log import MatcherDrafts

logger = logging.getLogger(__name__)

FAILED: Final = "the grammar cannot continue: its matcher failed; the server's log has the cause"
_NO_DRAFTS: Final = MatcherDrafts([], 0)


class MatcherSource(Protocol):
    """Has the matchers of requests with a compiled grammar."""

    def take(self, rid: str) -> Matcher:
        """The matcher of a request, at the beginning of its answer.

        Called once per request: when it arrives with `needs_grammar` False, or when its `GrammarReady` arrives.
        """
        ...


class FailedMatcher:
    """A `Matcher` with an error; it allows all tokens until the step is settled and its request ends."""

    __slots__ = ()

    ended = False
    error = FAILED
    error_code = MatcherErrorCode.BUG
    is_cut = False
    num_forced = 0
    wants_mask = False

    def limit(self, num_tokens: int) -> None:
        pass

    def fill(self, mask: MaskRow) -> None:
        mask.fill(-1)

    def allows(self, token_id: int) -> bool:
        return True

    def accept(self, token_ids: Sequence[int]) -> int:
        return 0

    def validate(self, token_ids: Sequence[int]) -> int:
        return 0

    def end_reasoning(self) -> bool:
        return False

    def forced(self) -> list[int]:
        return []

    def fill_drafts(self, draft_ids: Sequence[int], masks: npt.NDArray[np.int32]) -> None:
        masks.fill(-1)

    def copy(self) -> Matcher:
        return self


class GuardedMatcher:
    """A `Matcher` that never raises. After an exception it is a `FailedMatcher`."""

    __slots__ = ("_matcher", "_rid")

    def __init__(self, matcher: Matcher, rid: str) -> None:
        """Wrap the matcher of request `rid`."""
        self._matcher = matcher
        self._rid = rid

    @property
    def ended(self) -> bool:
        try:
            return self._matcher.ended
        except BaseException as error:
            return self._fail(error).ended

    @property
    def error(self) -> str:
        try:
            return self._matcher.error
        except BaseException as error:
            return self._fail(error).error

    @property
    def error_code(self) -> MatcherErrorCode | None:
        try:
            return self._matcher.error_code
        except BaseException as error:
            return self._fail(error).error_code

    @property
    def is_cut(self) -> bool:
        try:
            return self._matcher.is_cut
        except BaseException as error:
            return self._fail(error).is_cut

    @property
    def num_forced(self) -> int:
        try:
            return self._matcher.num_forced
        except BaseException as error:
            return self._fail(error).num_forced

    @property
    def wants_mask(self) -> bool:
        try:
            return self._matcher.wants_mask
        except BaseException as error:
            return self._fail(error).wants_mask

    def limit(self, num_tokens: int) -> None:
        try:
            self._matcher.limit(num_tokens)
        except BaseException as error:
            self._fail(error)

    def fill(self, mask: MaskRow) -> None:
        try:
            self._matcher.fill(mask)
        except BaseException as error:
            self._fail(error).fill(mask)

    def allows(self, token_id: int) -> bool:
        try:
            return self._matcher.allows(token_id)
        except BaseException as error:
            return self._fail(error).allows(token_id)

    def accept(self, token_ids: Sequence[int]) -> int:
        try:
            return self._matcher.accept(token_ids)
        except BaseException as error:
            return self._fail(error).accept(token_ids)

    def validate(self, token_ids: Sequence[int]) -> int:
        try:
            return self._matcher.validate(token_ids)
        except BaseException as error:
            return self._fail(error).validate(token_ids)

    def end_reasoning(self) -> bool:
        try:
            return self._matcher.end_reasoning()
        except BaseException as error:
            return self._fail(error).end_reasoning()

    def forced(self) -> list[int]:
        try:
            return self._matcher.forced()
        except BaseException as error:
            return self._fail(error).forced()

    def fill_drafts(self, draft_ids: Sequence[int], masks: npt.NDArray[np.int32]) -> None:
        try:
            self._matcher.fill_drafts(draft_ids, masks)
        except BaseException as error:
            self._fail(error).fill_drafts(draft_ids, masks)

    def copy(self) -> Matcher:
        try:
            return GuardedMatcher(self._matcher.copy(), self._rid)
        except BaseException as error:
            return self._fail(error)

    def _fail(self, error: BaseException) -> FailedMatcher:
        """Log an exception. If it does not come from the matcher (an interrupt, an exit), it is raised again."""
        if not isinstance(error, Exception) and type(error).__module__ != PANIC_MODULE:
            raise error
        logger.error("the matcher of a request failed rid=%s", self._rid, exc_info=error)
        self._matcher = failed = FailedMatcher()
        return failed


class LoggedEnd(NamedTuple):
    """End of a request by its grammar.

    Attributes:
        output_len: tokens of the answer.
        error: why the grammar could not continue; "" if it was complete.
        is_cut: as in `Matcher`.
    """

    output_len: int
    error: str
    is_cut: bool = False


class LoggedMatchers:
    """A `MatcherSource` that knows what happens in the next call of the scheduler.

    Attributes:
        ends: the requests that their grammars end in that call.
        drafts: what the matchers say about drafts in that call, as in `PassRecord.grammar_drafts`.
    """

    def __init__(self) -> None:
        self.ends: Mapping[str, LoggedEnd] = {}
        self.drafts: Mapping[str, MatcherDrafts] = {}

    def take(self, rid: str) -> Matcher:
        return LoggedMatcher(self, rid)


class LoggedMatcher:
    """A `Matcher` that compiles nothing and fills no masks."""

    __slots__ = ("_num_accepted", "_rid", "_source")

    num_forced = 0  # the log does not have it, and no decision depends on it

    def __init__(self, source: LoggedMatchers, rid: str, num_accepted: int = 0) -> None:
        self._source = source
        self._rid = rid
        self._num_accepted = num_accepted

    @property
    def ended(self) -> bool:
        end = self._end
        return end is not None and not end.error

    @property
    def error(self) -> str:
        end = self._end
        return "" if end is None else end.error

    @property
    def error_code(self) -> MatcherErrorCode | None:
        """The log does not have it, and no decision depends on it."""
        return MatcherErrorCode.BUG if self.error else None

    @property
    def is_cut(self) -> bool:
        end = self._end
        return end is not None and end.is_cut

    @property
    def wants_mask(self) -> bool:
        """A replay has no logits."""
        return False

    def limit(self, num_tokens: int) -> None:
        pass

    def fill(self, mask: MaskRow) -> None:
        pass

    def allows(self, token_id: int) -> bool:
        return True

    def accept(self, token_ids: Sequence[int]) -> int:
        self._num_accepted += len(token_ids)
        return len(token_ids)

    def validate(self, token_ids: Sequence[int]) -> int:
        return self._source.drafts.get(self._rid, _NO_DRAFTS).num_valid

    def end_reasoning(self) -> bool:
        return False

    def forced(self) -> list[int]:
        return list(self._source.drafts.get(self._rid, _NO_DRAFTS).forced)

    def fill_drafts(self, draft_ids: Sequence[int], masks: npt.NDArray[np.int32]) -> None:
        pass

    def copy(self) -> Matcher:
        return LoggedMatcher(self._source, self._rid, self._num_accepted)

    @property
    def _end(self) -> LoggedEnd | None:
        """The request's end, once the matcher has accepted all of its tokens."""
        end = self._source.ends.get(self._rid)
        return end if end is not None and self._num_accepted >= end.output_len else None
