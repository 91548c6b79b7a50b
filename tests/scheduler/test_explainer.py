"""Tests of `scheduler/explainer.py`: what clients are told, and what they are not."""

from __future__ import annotations

from engine.runtime.messages import Explain, Explanation
from engine.scheduler.cache_miss import MissKind
from engine.scheduler.why import explain


def test_a_client_does_not_learn_what_is_cached_under_another_salt(make_scheduler):
    harness = make_scheduler(page_size=4)
    prompt = list(range(1, 33))
    harness.submit("mine", prompt=prompt, extra_key="a")
    harness.run_until_idle()
    harness.submit("yours", prompt=prompt, extra_key="b")
    harness.run_until_idle()

    harness.scheduler.handle(Explain(7, "yours"), harness.now_s)
    (told,) = harness.scheduler.take_outputs()

    assert isinstance(told, Explanation) and told.found and told.explain_id == 7
    operator = explain(harness.scheduler.decisions, "yours")
    assert MissKind.OTHER_NAMESPACE.text in str(operator)
    assert MissKind.OTHER_NAMESPACE.text not in str(told)
    assert MissKind.COLD.text in str(told)
