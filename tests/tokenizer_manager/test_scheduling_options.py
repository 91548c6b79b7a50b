"""What clients may ask of the scheduler, for HTTP and `LLM` alike."""

from __future__ import annotations

import itertools
import math

import pytest

from engine.runtime.config.engine_config import SchedulerConfig
from engine.runtime.errors import RequestError
from engine.tokenizer_manager.scheduling_options import (
    MAX_PRIORITY,
    MAX_TIMEOUT_S,
    PRIORITY_CLASSES,
    checked_priority,
    checked_timeout,
    tenant_of,
)


def test_classes_are_further_apart_than_preemption_asks():
    levels = sorted(PRIORITY_CLASSES.values())
    threshold = SchedulerConfig().priority_preemption_threshold
    assert all(high - low > threshold for low, high in itertools.pairwise(levels))


@pytest.mark.parametrize("value", [MAX_PRIORITY, -MAX_PRIORITY, 0, 5])
def test_numbers_in_range_are_priorities(value):
    assert checked_priority(value) == value


@pytest.mark.parametrize("value", [None, ""])
def test_no_priority_is_the_usual_one(value):
    assert checked_priority(value) == 0


@pytest.mark.parametrize("value", [MAX_PRIORITY + 1, -MAX_PRIORITY - 1, "High", "x" * 10_000])
def test_other_priorities_are_refused_with_value_and_rule(value):
    with pytest.raises(RequestError, match="^importance is .*larger ones go first$") as caught:
        checked_priority(value, "importance")
    assert (caught.value.param, caught.value.status) == ("importance", 400)
    assert len(caught.value.message) < 250


@pytest.mark.parametrize("value", [None, 1e-3, 1, MAX_TIMEOUT_S])
def test_timeouts_in_range_pass(value):
    assert checked_timeout(value, "timeout") == value


@pytest.mark.parametrize("value", [0, -0.0, -1, math.nan, math.inf, -math.inf, MAX_TIMEOUT_S + 1])
def test_other_timeouts_are_refused_with_value_and_rule(value):
    with pytest.raises(RequestError, match=r"^timeout is .*\(0, 86400\] seconds; leave it out") as caught:
        checked_timeout(value, "timeout")
    assert (caught.value.param, caught.value.code) == ("timeout", "invalid_value")


def test_tenants_are_stable_short_and_keep_keys_secret():
    assert tenant_of("alice", b"sk-1") == "alice"
    assert tenant_of(None, b"sk-1") == tenant_of("", b"sk-1") == "key-8eb39fe0118081d6"
    assert tenant_of(None, b"sk-1") != tenant_of(None, b"sk-2")
    assert tenant_of(None, b"") == ""
    long = [tenant_of("x" * 100_000 + end, b"") for end in "ab"]
    assert long[0] != long[1]
    assert all(len(tenant) < 64 for tenant in long)
