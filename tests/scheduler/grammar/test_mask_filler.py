"""MaskFiller: a row of logits has the mask of its position; rows without one are left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.runtime.step_plan import ForwardMode, StepPlan
from engine.scheduler.arrays import EMPTY
from engine.scheduler.batch import ScheduleBatch
from engine.scheduler.grammar.mask_filler import MaskFiller
from tests.scheduler.grammar.toy_matcher import VOCAB_SIZE, ToyGrammar, ToyMatcher, allowed_by


class Requests:
    """What the filler reads of a request."""

    def __init__(self, matcher: ToyMatcher | None, *, is_checked_late: bool = False) -> None:
        self.matcher = matcher
        self.is_checked_late = is_checked_late


def batch_of(
    matchers: list[ToyMatcher | None], sampled: list[int], drafts: dict[int, list[int]] | None = None
) -> Any:
    per_request = [(drafts or {}).get(idx, []) for idx in range(len(matchers))]
    counts = np.array([len(each) for each in per_request], dtype=np.int32)
    flat = np.array([token for each in per_request for token in each], dtype=np.int32)
    plan = StepPlan(
        1,
        ForwardMode.DECODE,
        num_drafts=counts.tobytes() if len(flat) else b"",
        draft_ids=flat.tobytes(),
    )
    reqs: Any = [Requests(matcher) for matcher in matchers]
    ids = np.array(sampled, dtype=np.int32)
    return ScheduleBatch(plan, reqs, 0, EMPTY, EMPTY, EMPTY, len(flat), ids, has_grammar=True)


def filled(batch: Any, here: list[bool] | None = None) -> dict[int, frozenset[int]]:
    masks = MaskFiller(VOCAB_SIZE).fill(batch, np.array(here or [True] * len(batch.reqs)))
    if masks is None:
        return {}
    assert masks.indices.dtype == np.int64 and masks.bits.shape == (len(masks.indices), 4)
    rows = masks.indices.tolist()
    return {row: allowed_by(bits) for row, bits in zip(rows, masks.bits, strict=True)}


def toys(count: int) -> list[ToyMatcher | None]:
    return [ToyMatcher(ToyGrammar(seed=seed)) for seed in range(count)]


def first_of(seed: int, *tokens: int) -> frozenset[int]:
    return ToyGrammar(seed=seed).allowed(tokens)


def test_a_row_per_request_that_samples():
    assert filled(batch_of(toys(4), [0, 2, 3])) == {0: first_of(0), 1: first_of(2), 2: first_of(3)}


def test_requests_without_grammar_have_no_mask():
    matchers = [None, *toys(2), None]
    assert filled(batch_of(matchers, [0, 1, 2, 3])) == {1: first_of(0), 2: first_of(1)}
    assert filled(batch_of([None, None], [0, 1])) == {}


def test_requests_that_have_left_have_none():
    assert filled(batch_of(toys(3), [0, 1, 2]), [True, False, True]) == {0: first_of(0), 2: first_of(2)}


def test_drafts_have_a_row_each_and_shift_the_others():
    grammar = ToyGrammar(seed=1)
    first = min(grammar.allowed([]))
    drafts = [first, min(grammar.allowed([first]))]
    batch = batch_of([*toys(2), None, *toys(1)], [0, 1, 2, 3], {1: drafts, 2: [9]})
    assert filled(batch) == {
        0: first_of(0),
        1: first_of(1),
        2: first_of(1, drafts[0]),
        3: first_of(1, *drafts),
        6: first_of(0),
    }


def test_rows_after_the_end_allow_all_tokens():
    grammar = ToyGrammar(seed=1, length=1)
    masks = filled(batch_of([ToyMatcher(grammar)], [0], {0: [min(grammar.allowed([]))]}))
    assert masks == {0: grammar.allowed([]), 1: frozenset(range(VOCAB_SIZE))}


@pytest.mark.parametrize(
    "matcher",
    [ToyMatcher(ToyGrammar(free_until=2)), ToyMatcher(ToyGrammar(length=1), [5]), ToyMatcher(ToyGrammar())],
    ids=["free", "ended", "failed"],
)
def test_not_asked(matcher):
    if not matcher.grammar.free_until and not matcher.ended:
        matcher.error = "failed"
    assert filled(batch_of([matcher], [0])) == {}
    assert not matcher.calls


def test_a_dead_end_is_an_error_and_allows_all_tokens():
    matcher = ToyMatcher(ToyGrammar(fault="dead", fault_at=0))
    assert filled(batch_of([matcher], [0])) == {0: frozenset(range(VOCAB_SIZE))}
    assert matcher.error == "no token is allowed"


def test_the_array_is_used_again_and_grows():
    filler = MaskFiller(VOCAB_SIZE)
    first = filler.fill(batch_of(toys(2), [0, 1]), np.array([True, True]))
    again = filler.fill(batch_of(toys(2), [0, 1]), np.array([True, True]))
    more = filler.fill(batch_of(toys(9), list(range(9))), np.ones(9, dtype=np.bool_))
    assert first is not None and again is not None and more is not None
    assert np.shares_memory(first.bits, again.bits) and len(more.bits) == 9


def test_rows_that_can_be_checked_get_a_mask_only_for_a_token_that_is_refused():
    batch = batch_of([*toys(4), None], [0, 1, 2, 3, 4])
    for idx in (0, 1, 2):
        batch.reqs[idx].is_checked_late = True
    filler, here = MaskFiller(VOCAB_SIZE), np.array([True, True, False, True, True])

    before = filler.fill_unchecked(batch, here)
    assert before is not None and before.indices.tolist() == [3]

    refused = min(set(range(VOCAB_SIZE)) - first_of(1))
    token_ids = np.array([min(first_of(0)), refused, 0, 0, 0], dtype=np.int64)
    after = filler.fill_refused(batch, here, token_ids)
    assert after is not None and after.indices.tolist() == [1]
    assert allowed_by(after.bits[0]) == first_of(1)

    token_ids[1] = min(first_of(1))
    assert filler.fill_refused(batch, here, token_ids) is None
