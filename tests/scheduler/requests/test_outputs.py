"""Tests of `scheduler/requests/outputs.py`: what ends a request."""

import numpy as np
import pytest

from engine.runtime.messages import FinishKind, GenerateRequest
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.transport.message_base import Logprobs
from engine.scheduler.requests.outputs import StopRules, joined, output_row
from engine.scheduler.requests.req import Req

EOS = frozenset({7})


def make_req(output_len, **sampling):
    params = SamplingParams(**({"max_new_tokens": 10} | sampling))
    req = Req(GenerateRequest("r", np.zeros(3, np.int32).tobytes(), params), 1, 0.0)
    req.output_len = output_len
    return req


@pytest.mark.parametrize(
    ("output_len", "token", "sampling", "kind"),
    [
        (1, 7, {}, FinishKind.STOP),
        (1, 8, {}, None),
        (1, 7, {"ignore_eos": True}, None),
        (1, 8, {"stop_token_ids": (8, 9)}, FinishKind.STOP),
        (1, 8, {"stop_token_ids": (8,), "ignore_eos": True}, FinishKind.STOP),
        (10, 8, {}, FinishKind.LENGTH),
        (10, 7, {}, FinishKind.STOP),  # stop goes before length
        (3, 7, {"min_new_tokens": 3}, None),  # the third token may not be the end
        (4, 7, {"min_new_tokens": 3}, FinishKind.STOP),
        (10, 7, {"min_new_tokens": 10}, FinishKind.LENGTH),
    ],
)
def test_what_ends_a_request(output_len, token, sampling, kind):
    finish = StopRules(EOS, vocab_size=50).finish(make_req(output_len, **sampling), token)

    assert (finish.kind if finish else None) is kind
    assert finish is None or finish.matched == (token if kind is FinishKind.STOP else None)


def test_the_last_row_counts_what_the_request_has_consumed():
    req = make_req(4)
    req.cached_tokens, req.num_retractions, req.queue_s = 2, 1, 0.5

    usage = output_row(req).usage

    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 4, 2)
    assert (usage.num_retractions, usage.queue_s) == (1, 0.5)


def test_prompt_logprobs_of_one_token_are_empty_but_there():
    row = output_row(make_req(1, prompt_logprobs=2))

    assert row.prompt_logprobs == Logprobs(b"")


def test_logprobs_of_chunks_are_joined_in_order():
    parts = [Logprobs(b"aaaa", b"AAAA", b"1111", 1), Logprobs(b"bbbb", b"BBBB", b"2222", 1)]

    assert joined(parts) == Logprobs(b"aaaabbbb", b"AAAABBBB", b"11112222", 1)
