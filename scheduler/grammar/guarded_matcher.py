"""`GuardedMatcher`: turns an exception of a matcher into that matcher's error, so that it ends only its own request.

Every matcher of a running request is inside one; no other part of the scheduler expects a matcher to raise.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ...grammar.backend import MaskRow, Matcher, MatcherErrorCode

logger = logging.getLogger(__name__)

FAILED: Final = "the grammar cannot continue: its matcher failed; the server's log has the cause"
_PANIC_MODULE: Final = "pyo3_runtime"
"""A panic in a Rust library is a `BaseException` of this module."""


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
        if not isinstance(error, Exception) and type(error).__module__ != _PANIC_MODULE:
            raise error
        logger.error("the matcher of a request failed rid=%s", self._rid, exc_info=error)
        self._matcher = failed = FailedMatcher()
        return failed
