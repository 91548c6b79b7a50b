"""`GrammarDrafts`: draft tokens of requests with a grammar.

Two kinds of drafts come from or go through a matcher:

- Forced tokens: where the grammar allows only one text (the name of a JSON field and the signs around it), the matcher
  knows the next tokens. They are drafts like any others, so they change no answer: if the model splits the same text
  into other tokens, they are rejected.
- N-gram drafts are cut at the first token that the grammar refuses, since it cannot be accepted.

The answers of the matchers are kept for the decision log: a replay has no grammars.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..arrays import IntArray
from ..records.decision_log import MatcherDrafts
from ..requests.req import Req
from ..requests.row_states import RowStates


class GrammarDrafts:
    """See the module."""

    def __init__(self, states: RowStates) -> None:
        self._states = states
        self._answers: dict[str, MatcherDrafts] = {}

    def concerns(self, rows: IntArray) -> bool:
        """Whether a request in these rows has a grammar."""
        return bool(self._states.has_grammar[rows].any())

    def propose(self, req: Req, most: int, ngram_ids: Sequence[int] = ()) -> tuple[list[int], int]:
        """At most `most` drafts of a request with a matcher, and how many of them are forced; they come first.

        N-gram drafts follow forced tokens if they begin with them, because then they are the text after them.

        Args:
            req: has a matcher.
            most: of forced tokens; there may be fewer n-gram drafts.
            ngram_ids: proposals from the request's text.
        """
        assert req.matcher is not None
        forced = req.matcher.forced()[:most]
        num_forced = len(forced)
        follows = len(ngram_ids) > num_forced and list(ngram_ids[:num_forced]) == forced
        token_ids = list(ngram_ids) if follows else forced
        if not token_ids:
            return [], 0
        num_valid = req.matcher.validate(token_ids)
        self._answers[req.rid] = MatcherDrafts(forced, num_valid)
        return token_ids[:num_valid], min(num_forced, num_valid)

    def take_answers(self) -> dict[str, MatcherDrafts]:
        """What matchers have said since the last call, by rid."""
        if not self._answers:
            return {}
        answers, self._answers = self._answers, {}
        return answers
