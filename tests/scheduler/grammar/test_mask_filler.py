"""MaskFiller: a row of logits has the mask of its position; rows without one are left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.runtime.step_plan import ForwardMode, StepPlan, TokenMasks
from engine.scheduler.arrays import EMPTY
from engine.scheduler.batch import ScheduleBatch
from engine.scheduler.grammar.mask_filler import MaskFiller
from engine.scheduler.records.decision_log import RefusedToken
from engine.scheduler.requests.req import GrammarFigures
from tests.scheduler.grammar.toy_matcher import VOCAB_SIZE, ToyGrammar, ToyMatcher, allowed_by


class Requests:
    """What the filler reads of a request."""

    def __init__(self, matcher: ToyMatcher | None, is_checked_late: bool = True) -> None:
        self.matcher = matcher
        self.is_checked_late = is_checked_late
        self.ends_reasoning = False
        self.grammar_figures = GrammarFigures()


class Pool:
    """What the filler reads of a pool: rows are batch indices, and the epoch of a row changes when it is left."""

    def __init__(self, here: list[bool]) -> None:
        self.epoch = np.array([0 if stays else 1 for stays in here])


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
    ids, rows = np.array(sampled, dtype=np.int32), np.arange(len(matchers), dtype=np.int32)
    epochs = np.zeros(len(matchers), dtype=np.int32)
    return ScheduleBatch(plan, reqs, 0, rows, epochs, EMPTY, len(flat), ids, has_grammar=True)


def filler_of(batch: Any, here: list[bool] | None = None) -> MaskFiller:
    pool: Any = Pool(here or [True] * len(batch.reqs))
    return MaskFiller(VOCAB_SIZE, pool)


def filled(batch: Any, here: list[bool] | None = None) -> dict[int, frozenset[int]]:
    return by_row(filler_of(batch, here).fill(batch))


def by_row(masks: TokenMasks | None) -> dict[int, frozenset[int]]:
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
    assert matcher.error == "the grammar cannot continue after 0 tokens: no token is allowed"


def test_the_array_is_used_again_and_grows():
    filler = filler_of(batch_of(toys(9), []))
    first = filler.fill(batch_of(toys(2), [0, 1]))
    again = filler.fill(batch_of(toys(2), [0, 1]))
    more = filler.fill(batch_of(toys(9), list(range(9))))
    assert first is not None and again is not None and more is not None
    assert np.shares_memory(first.bits, again.bits) and len(more.bits) == 9


# ------------------------------------------------------------ tokens that are checked after sampling


def test_only_refused_tokens_need_a_mask():
    batch = batch_of([*toys(3), None], [0, 1, 2, 3])
    good = [min(first_of(seed)) for seed in range(3)]
    bad = next(token for token in range(VOCAB_SIZE) if token not in first_of(1))
    filler = filler_of(batch)
    assert filler.fill_unchecked(batch) is None
    assert filler.fill_refused(batch, np.array([*good, 5]), []) is None
    assert by_row(filler.fill_refused(batch, np.array([good[0], bad, good[2], 5]), [])) == {1: first_of(1)}


def test_rows_that_cannot_be_checked_have_their_mask_before():
    batch = batch_of(toys(3), [0, 1, 2])
    batch.reqs[1].is_checked_late = False
    filler = filler_of(batch, [True, True, False])
    assert by_row(filler.fill_unchecked(batch)) == {1: first_of(1)}
    tokens = np.array([token for seed in range(3) for token in [next(iter(set(range(97)) - first_of(seed)))]])
    assert by_row(filler.fill_refused(batch, tokens, [])) == {0: first_of(0)}, (
        "and requests that left have none"
    )


def test_free_text_is_not_checked():
    batch = batch_of([ToyMatcher(ToyGrammar(free_until=2))], [0])
    filler = filler_of(batch)
    assert filler.fill_unchecked(batch) is None and filler.fill_refused(batch, np.array([5]), []) is None


def drafted(*wrong: int) -> tuple[Any, list[int], list[int]]:
    """A batch with three drafts, the drafts, and the tokens of its rows; those at `wrong` are not allowed."""
    grammar, drafts = ToyGrammar(seed=1), list[int]()
    for _ in range(3):
        drafts.append(min(grammar.allowed(drafts)))
    tokens = [*drafts, min(grammar.allowed(drafts))]
    for k in wrong:
        tokens[k] = next(token for token in range(VOCAB_SIZE) if token not in grammar.allowed(drafts[:k]))
    return batch_of([None, ToyMatcher(grammar)], [0, 1], {1: drafts}), drafts, [7, *tokens]


def test_drafts_that_were_right_need_no_mask():
    batch, _, tokens = drafted()
    assert filler_of(batch).fill_refused(batch, np.array(tokens), []) is None


@pytest.mark.parametrize("wrong", range(4))
def test_a_refused_token_among_drafts_has_a_mask_and_so_have_the_rows_after_it(wrong):
    batch, drafts, tokens = drafted(wrong)
    found = by_row(filler_of(batch).fill_refused(batch, np.array(tokens), []))
    assert found == {1 + k: first_of(1, *drafts[:k]) for k in range(wrong, 4)}
    assert batch.reqs[1].matcher.tokens == [], "it looked ahead with a copy"


def test_rows_after_a_wrong_draft_are_not_checked():
    batch, drafts, tokens = drafted(2, 3)
    tokens[2] = next(token for token in first_of(1, drafts[0]) if token != drafts[1])
    assert filler_of(batch).fill_refused(batch, np.array(tokens), []) is None


# ------------------------------------------------------------ refused tokens


def test_a_token_that_a_mask_does_not_allow_is_refused():
    batch = batch_of([*toys(2), None, *toys(1)], [0, 1, 2, 3])
    batch.reqs[0].is_checked_late = False
    filler = filler_of(batch)
    bad = [next(token for token in range(VOCAB_SIZE) if token not in first_of(seed)) for seed in range(2)]

    assert list(by_row(filler.fill_unchecked(batch))) == [0]
    early: list[RefusedToken] = []
    filler.find_refused([bad[0]], early)
    filler.find_refused([min(first_of(0))], early)
    late: list[RefusedToken] = []
    filler.fill_refused(batch, np.array([bad[0], bad[1], 5, min(first_of(0))]), late)

    assert early == [RefusedToken(0, 0, bad[0])]
    assert late == [RefusedToken(1, 0, bad[1])]


def test_a_refused_token_among_drafts_has_its_place_in_the_run_and_so_have_those_after_it():
    batch, _, tokens = drafted(1, 3)
    refused: list[RefusedToken] = []
    filler_of(batch).fill_refused(batch, np.array(tokens), refused)
    assert refused == [RefusedToken(1, 1, tokens[2]), RefusedToken(1, 3, tokens[4])]


def test_another_split_of_forced_text_is_not_refused():
    grammar = ToyGrammar(seed=2, forced=((0, 9),))
    batch = batch_of([ToyMatcher(grammar)], [0])
    other = min(grammar.accepted([]) - grammar.allowed([]))
    refused: list[RefusedToken] = []
    masks = filler_of(batch).fill_refused(batch, np.array([other]), refused)
    assert list(by_row(masks)) == [0], "the tokenizer's split is sampled"
    assert refused == []


def test_each_request_has_its_own_time():
    times = iter([0.0, 1.0, 3.0, 7.0])
    batch = batch_of(toys(3), [0, 1, 2])
    filler_of(batch).fill(batch, lambda: next(times))
    assert [req.grammar_figures.mask_s for req in batch.reqs] == [1.0, 2.0, 4.0]
