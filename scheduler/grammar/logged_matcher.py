"""`LoggedMatchers`: matchers of a replay: the decision log says when a grammar ended a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ...grammar.backend import MaskRow, Matcher, MatcherErrorCode


class LoggedMatchers:
    """A `MatcherSource` that knows which grammars end with the step that is settled next.

    Attributes:
        ends: rid -> why the grammar failed; "" if it was complete. As in `Settled.grammar_ends`.
    """

    __slots__ = ("ends",)

    def __init__(self) -> None:
        self.ends: Mapping[str, str] = {}

    def take(self, rid: str) -> Matcher:
        """See `MatcherSource`."""
        return LoggedMatcher(self, rid)


class LoggedMatcher:
    """A `Matcher` that compiles nothing and fills no masks."""

    __slots__ = ("_rid", "_source")

    def __init__(self, source: LoggedMatchers, rid: str) -> None:
        self._source = source
        self._rid = rid

    @property
    def ended(self) -> bool:
        """See `Matcher`."""
        return self._source.ends.get(self._rid) == ""

    @property
    def error(self) -> str:
        """See `Matcher`."""
        return self._source.ends.get(self._rid, "")

    @property
    def error_code(self) -> MatcherErrorCode | None:
        """See `Matcher`. A replay has the text only."""
        return None

    @property
    def wants_mask(self) -> bool:
        """See `Matcher`. A replay has no logits."""
        return False

    def fill(self, mask: MaskRow) -> None:
        """See `Matcher`."""

    def accept(self, token_ids: Sequence[int]) -> int:
        """See `Matcher`."""
        return len(token_ids)

    def validate(self, token_ids: Sequence[int]) -> int:
        """See `Matcher`."""
        return len(token_ids)

    def forced(self) -> list[int]:
        """See `Matcher`."""
        return []

    def fill_drafts(self, draft_ids: Sequence[int], masks: npt.NDArray[np.int32]) -> None:
        """See `Matcher`."""

    def copy(self) -> Matcher:
        """See `Matcher`."""
        return LoggedMatcher(self._source, self._rid)
