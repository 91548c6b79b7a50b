"""GuardedMatcher: whatever a matcher raises is the error of its own request."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from engine.grammar.backend import MatcherErrorCode
from engine.runtime.messages import FinishKind
from engine.scheduler.grammar.matchers import FAILED, FailedMatcher, GuardedMatcher
from tests.scheduler.grammar.toy_matcher import ToyGrammar, ToyMatcher, allowed_by
from tests.scheduler.harness import Harness

PANIC = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})


class Raising:
    """A matcher that raises everywhere."""

    def __init__(self, error: BaseException) -> None:
        self.raised = error

    def __getattr__(self, name: str) -> Any:
        if name in ("ended", "error", "error_code", "wants_mask"):
            raise self.raised
        return self._raise

    def _raise(self, *args: Any) -> Any:
        raise self.raised


CALLS: dict[str, Any] = {
    "ended": lambda matcher: matcher.ended is False,
    "error": lambda matcher: matcher.error == FAILED,
    "error_code": lambda matcher: matcher.error_code is MatcherErrorCode.BUG,
    "wants_mask": lambda matcher: matcher.wants_mask is False,
    "allows": lambda matcher: matcher.allows(3) is True,
    "accept": lambda matcher: matcher.accept((1, 2)) == 0,
    "validate": lambda matcher: matcher.validate([1]) == 0,
    "forced": lambda matcher: matcher.forced() == [],
    "copy": lambda matcher: matcher.copy().error == FAILED,
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("error", [RuntimeError("no"), PANIC("in Rust")])
def test_each_call_becomes_an_error(call, error):
    matcher = GuardedMatcher(Raising(error), "a")
    assert CALLS[call](matcher)
    assert matcher.error == FAILED and not matcher.ended
    assert CALLS[call](matcher), "and stays one"


@pytest.mark.parametrize("call", ["fill", "fill_drafts"])
def test_masks_of_a_failed_matcher_allow_all_tokens(call):
    matcher, masks = GuardedMatcher(Raising(ValueError("no")), "a"), np.zeros((3, 4), dtype=np.int32)
    for _ in range(2):
        masks[:] = 5
        if call == "fill":
            matcher.fill(masks[0])
            assert (masks[0] == -1).all() and (masks[1:] == 5).all()
        else:
            matcher.fill_drafts([1, 2], masks)
            assert (masks == -1).all()
    assert matcher.error == FAILED


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
def test_an_interrupt_is_not_the_matchers(error):
    with pytest.raises(type(error)):
        GuardedMatcher(Raising(error), "a").accept((1,))


def test_else_it_is_the_matcher():
    grammar = ToyGrammar(seed=3, length=6, forced=((0, 2),))
    toy, guarded = ToyMatcher(grammar), GuardedMatcher(ToyMatcher(grammar), "a")
    masks = np.zeros((3, 4), dtype=np.int32), np.zeros((3, 4), dtype=np.int32)
    forced = toy.forced()
    assert guarded.forced() == forced and len(forced) == 2
    toy.fill_drafts(forced, masks[0])
    guarded.fill_drafts(forced, masks[1])
    assert (masks[0] == masks[1]).all()
    assert guarded.validate([*forced, 96, 96, 96]) == toy.validate([*forced, 96, 96, 96])
    assert guarded.accept(forced) == 2
    copy = guarded.copy()
    while not guarded.ended:
        guarded.fill(masks[0][0])
        guarded.accept((min(allowed_by(masks[0][0])),))
    assert not copy.ended and copy.wants_mask and not guarded.error and guarded.error_code is None


def test_a_call_is_one_more_call_of_python():
    """Of a microsecond at most: one comes on top of every call, for each request and step."""

    class Still:
        ended, error = False, ""

        def accept(self, token_ids: Any) -> int:
            return 1

    still: Any = Still()
    guarded = GuardedMatcher(still, "a")
    called = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        guarded.accept((1,))
    finally:
        sys.setprofile(None)

    assert called == ["accept", "accept"]


@pytest.mark.parametrize("fault", ["accept", "fill", "fill_drafts", "validate", "forced"])
def test_others_of_the_batch_continue(fault):
    harness = Harness()
    grammar = ToyGrammar(
        seed=1, fault=fault, fault_at=2 if fault in ("accept", "fill") else 3, forced=((3, 9),)
    )
    prompt = [3, 4, 5]
    harness.submit("bad", prompt=prompt, grammar=grammar, max_new_tokens=40)
    harness.submit("good", prompt=prompt, grammar=ToyGrammar(seed=2, forced=((3, 9),)), max_new_tokens=40)
    harness.submit("free", prompt=prompt, max_new_tokens=40)
    harness.run_until_idle()  # compares the answers
    kinds = {rid: answer.finish.kind for rid, answer in harness.answers.items() if answer.finish}
    assert kinds["good"] is kinds["free"] is FinishKind.LENGTH
    assert kinds["bad"] is FinishKind.ERROR


def test_without_a_matcher_a_request_ends_at_once():
    """The source raises: it does not know the request."""
    harness = Harness()
    harness.submit("a", message={"grammar": ToyGrammar().use})
    finish = harness.answers["a"].finish
    assert finish is not None and finish.kind is FinishKind.ERROR and finish.status == 500
    assert FAILED in finish.message
    assert FailedMatcher().copy().error == FAILED
