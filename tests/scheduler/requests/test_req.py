"""Tests of `scheduler/requests/req.py`."""

import itertools

import numpy as np
import pytest

from engine.runtime.messages import GenerateRequest
from engine.runtime.sampling_params import SamplingParams
from engine.scheduler.requests.req import TRANSITIONS, Req, ReqStatus


@pytest.fixture
def req():
    ids = np.arange(5, dtype=np.int32).tobytes()
    return Req(GenerateRequest("r", ids, SamplingParams(max_new_tokens=3, seed=0)), seq=1, now_s=10.0)


def test_lengths_come_from_the_message(req):
    assert (req.prompt_len, req.fill_len, req.output_len, req.max_new_tokens) == (5, 5, 0, 3)
    assert req.max_kv_len == 7  # the last generated token is never fed back


def test_each_status_has_the_time_it_was_first_entered(req):
    req.enter(ReqStatus.PREFILL, 11.0)
    req.enter(ReqStatus.RETRACTED, 12.0)
    req.enter(ReqStatus.PREFILL, 13.0)

    assert req.entered_s == {ReqStatus.WAITING: 10.0, ReqStatus.PREFILL: 11.0, ReqStatus.RETRACTED: 12.0}


def test_only_listed_transitions_are_possible(req):
    for before, after in itertools.product(ReqStatus, ReqStatus):
        req.status = before
        if after in TRANSITIONS[before]:
            req.enter(after, 0.0)
            assert req.status is after
        else:
            with pytest.raises(AssertionError, match="is not a transition"):
                req.enter(after, 0.0)


def test_every_status_leads_to_an_end_and_the_end_leads_nowhere():
    assert set(TRANSITIONS) == set(ReqStatus)
    assert not TRANSITIONS[ReqStatus.FINISHED]
    assert all(
        ReqStatus.FINISHED in TRANSITIONS[each] for each in ReqStatus if each is not ReqStatus.FINISHED
    )
