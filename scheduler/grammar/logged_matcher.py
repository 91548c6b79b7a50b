"""`LoggedMatchers`: matchers of a replay: the decision log says what the matchers of the run have said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...grammar.backend import MaskRow, Matcher, MatcherErrorCode
from ..records.decision_log import MatcherDrafts

_NO_DRAFTS = MatcherDrafts([], 0)


class LoggedEnd(NamedTuple):
    """How a grammar ended a request.

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
