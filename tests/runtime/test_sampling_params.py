"""Ranges of sampling parameters: what passes can travel to every process."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.runtime.errors import RequestError
from engine.runtime.sampling_params import MAX_COUNT, SamplingParams


@pytest.mark.parametrize("field", ["top_k", "min_new_tokens", "max_new_tokens"])
def test_counts_fit_into_every_message_and_array(field):
    def make(count: int) -> SamplingParams:
        values: dict[str, Any] = {field: count}
        return SamplingParams(**values)

    largest = make(MAX_COUNT)
    largest.verify(100)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(largest), type=SamplingParams) == largest

    for beyond in (MAX_COUNT + 1, 2**64, 2**70):
        with pytest.raises(RequestError, match=f"is {beyond}, but it must be at most {MAX_COUNT}"):
            make(beyond).verify(100)


@pytest.mark.parametrize(
    ("values", "param", "rule"),
    [
        ({"max_new_tokens": 0}, "max_tokens", "must be at least 1"),
        ({"min_new_tokens": -1}, "min_tokens", "must be 0 or more"),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_tokens", r"must not exceed max_tokens \(4\)"),
        ({"top_k": -2}, "top_k", "must be -1 or 0"),
        ({"temperature": float("nan")}, "temperature", r"must lie in \[0, 100\]"),
        ({"top_p": 0.0}, "top_p", r"must lie in \(0, 1\]"),
        ({"seed": 2**63}, "seed", "must lie in"),
        ({"logprobs": 21}, "logprobs", r"must lie in \[0, 20\]"),
        ({"logit_bias": {100: 1.0}}, "logit_bias", r"token ids in \[0, 100\)"),
        ({"stop": ("",)}, "stop", "an empty string"),
    ],
)
def test_a_value_out_of_range_is_named_with_its_rule(values: dict[str, Any], param: str, rule: str):
    with pytest.raises(RequestError, match=rule) as error:
        SamplingParams(**values).verify(100)
    assert error.value.param == param


@pytest.mark.parametrize("top_k", [-1, 0, 1, 50])
def test_usual_values_pass(top_k):
    SamplingParams(top_k=top_k, max_new_tokens=5, min_new_tokens=5, seed=2**63 - 1).verify(100)
