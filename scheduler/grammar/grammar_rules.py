"""How grammars advance with generated tokens, and when they end a request; `GrammarDrafts`: their draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from ...grammar.backend import Matcher, MatcherErrorCode
from ...runtime.messages import Finish, FinishKind, TokenOutput
from ..arrays import IntArray
from ..batch import ScheduleBatch
from ..records.decision_log import MatcherDrafts
from ..requests.req import Req
from ..requests.row_states import RowStates

MATCHED_GRAMMAR: Final = "grammar"
"""`Finish.matched` of a request that ended because its grammar allows no more text."""


def resume(req: Req) -> Finish | None:
    """Advance a new matcher over the tokens that the client has from an earlier attempt.

    Returns:
        the end of the request, if the grammar has refused one of them or is complete.
    """
    assert req.matcher is not None
    delivered = np.frombuffer(req.delivered_ids, dtype=np.int32).tolist()
    if delivered:
        req.matcher.accept(delivered)
        req.num_matched = len(delivered)
    return _end_of(req)


def advance(req: Req, token_id: int, finish: Finish | None) -> Finish | None:
    """Advance the matcher of a request over its newest token, which `output_len` counts; returns the request's end.

    Args:
        req: with a matcher. If a round of a multi-step decode has advanced it already, it stays as it is.
        token_id: the token.
        finish: the end by the stop rules. A stop token wins over the grammar, which wins over the length. An error of
            the grammar wins over both: the token was not restricted, or was refused.
            An answer that was cut (`Matcher.is_cut`) ends by its length.
    """
    matcher = req.matcher
    assert matcher is not None
    if (
        req.num_matched > req.output_len
    ):  # ahead by rounds of a multi-step decode; only the last one can end it
        return finish
    if req.num_matched < req.output_len:
        _accept(req, matcher, token_id)
    is_cut_end = matcher.ended and matcher.is_cut  # by an EOS token, which is a stop token too
    if finish is not None and finish.kind is FinishKind.STOP and not matcher.error and not is_cut_end:
        return finish
    return _end_of(req) or finish


def may_go_on(batch: ScheduleBatch, token_ids: Sequence[int]) -> bool:
    """Advance all matchers of a multi-step decode over the tokens ([B]) of a round; whether none of them has ended."""
    goes_on = True
    for req, token_id in zip(batch.reqs, token_ids, strict=True):
        if req.matcher is not None:
            _accept(req, req.matcher, token_id)
            goes_on = goes_on and not req.matcher.ended and not req.matcher.error
    return goes_on


def ends_by_grammar(batch: ScheduleBatch, rows: Sequence[TokenOutput]) -> dict[str, str]:
    """The requests of a settled batch that their grammars have ended: rid -> the matcher's error, "" if complete."""
    matchers = {req.rid: req.matcher for req in batch.reqs if req.matcher is not None}
    ends: dict[str, str] = {}
    for row in rows:
        matcher = matchers.get(row.rid)
        if row.finish is not None and matcher is not None:
            error = matcher.error
            if error or row.finish.matched == MATCHED_GRAMMAR:
                ends[row.rid] = error
    return ends


def _accept(req: Req, matcher: Matcher, token_id: int) -> None:
    matcher.accept((token_id,))
    figures = req.grammar_figures
    if figures is not None and figures.cut_at is None and matcher.is_cut:
        figures.cut_at = req.num_matched
    req.num_matched += 1


def _end_of(req: Req) -> Finish | None:
    assert req.matcher is not None
    if req.matcher.error:
        code = req.matcher.error_code
        if code is MatcherErrorCode.TOO_SHORT:
            return Finish(FinishKind.ERROR, message=req.matcher.error, status=400, code=code.value)
        text = f"{req.matcher.error}; change the schema or grammar, or send the request again"
        return Finish(FinishKind.ERROR, message=text, code="" if code is None else code.value)
    if not req.matcher.ended:
        return None
    kind = FinishKind.LENGTH if req.matcher.is_cut else FinishKind.STOP
    return Finish(kind, matched=MATCHED_GRAMMAR)


class GrammarDrafts:
    """Draft tokens of requests with a grammar.

    Two kinds of drafts come from or go through a matcher:

    - Forced tokens: where the grammar allows only one text (the name of a JSON field and the signs around it), the
      matcher knows the next tokens. They are drafts like any others, so they change no answer: if the model splits the
      same text into other tokens, they are rejected.
    - N-gram drafts are cut at the first token that the grammar refuses, since it cannot be accepted.

    The answers of the matchers are kept for the decision log: a replay has no grammars.
    """

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
        """Take the answers of the matchers since the last call, by rid."""
        if not self._answers:
            return {}
        answers, self._answers = self._answers, {}
        return answers
