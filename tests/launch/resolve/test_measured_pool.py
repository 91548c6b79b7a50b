"""From measured bytes to KV pages."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from engine.launch.resolve.measured_pool import Measured, fit_pool, graphs_estimate
from engine.models.spec.sizes import GIB, MIB
from engine.runtime.errors import ConfigError
from engine.runtime.feasibility import Capacity

PAGE_BYTES = 2 * MIB
MEASURED = Measured(free_bytes=60 * GIB, step_bytes=3 * GIB, graph_bytes=1 * GIB)
PLANNED = Capacity(max_model_len=8192, num_pages=1000, page_size=16, max_running_requests=256, vocab_size=97)


@pytest.mark.parametrize("planned_pages", [10, 1000, 1 << 20])
def test_an_estimate_becomes_what_is_left(planned_pages):
    planned = replace(PLANNED, num_pages=planned_pages)
    fitted = fit_pool(planned, MEASURED, 0.9, page_bytes=PAGE_BYTES, is_estimate=True)

    assert fitted.num_pages == int(56 * GIB * 0.9) // PAGE_BYTES - 1, "the dummy page is one more"
    assert replace(fitted, num_pages=planned_pages) == planned


def test_no_more_than_all_requests_together_can_use():
    planned = replace(PLANNED, max_running_requests=2)
    fitted = fit_pool(planned, MEASURED, 0.9, page_bytes=PAGE_BYTES, is_estimate=True)
    assert fitted.num_pages == 2 * 512


@pytest.mark.parametrize("fraction", [0.1, 0.9])
def test_what_the_user_has_set_stands_while_there_is_room(fraction):
    most = int(56 * GIB * 0.95) // PAGE_BYTES - 1
    planned = replace(PLANNED, num_pages=most)
    assert fit_pool(planned, MEASURED, fraction, page_bytes=PAGE_BYTES, is_estimate=False) == planned
    too_many = replace(PLANNED, num_pages=most + 1)
    with pytest.raises(
        ConfigError,
        match=re.escape(
            "which takes 53.2 GiB, but the device has (60.0 GiB free after the weights - 3.0 GiB largest step - "
            "1.0 GiB recordings) x 0.95; lower --max-total-tokens, --chunked-prefill-size or "
        ),
    ):
        fit_pool(too_many, MEASURED, fraction, page_bytes=PAGE_BYTES, is_estimate=False)


@pytest.mark.parametrize("step_gib", [54, 70])
def test_a_pool_that_does_not_hold_one_context_is_an_error(step_gib):
    measured = Measured(free_bytes=55 * GIB, step_bytes=step_gib * GIB, graph_bytes=0)
    planned = replace(PLANNED, max_model_len=131072)
    with pytest.raises(
        ConfigError, match="max_model_len is 131072, but the device holds .* tokens: .*raise --mem-fraction"
    ):
        fit_pool(planned, measured, 0.9, page_bytes=PAGE_BYTES, is_estimate=True)


def test_a_context_of_the_engines_own_choice_becomes_smaller():
    measured = Measured(free_bytes=10 * GIB, step_bytes=0, graph_bytes=0)
    planned = replace(PLANNED, max_model_len=131072)
    fitted = fit_pool(planned, measured, 0.5, page_bytes=PAGE_BYTES, is_estimate=True, len_is_estimate=True)
    assert fitted == replace(planned, num_pages=2559, max_model_len=2559 * 16)
    tiny = Measured(free_bytes=60 * MIB, step_bytes=0, graph_bytes=0)
    with pytest.raises(ConfigError, match="the device holds 224 tokens"):
        fit_pool(planned, tiny, 0.5, page_bytes=PAGE_BYTES, is_estimate=True, len_is_estimate=True)


def test_what_attention_gathers_is_part_of_a_page():
    measured = Measured(free_bytes=GIB, step_bytes=0, graph_bytes=0, gathered_token_bytes=PAGE_BYTES // 16)
    planned = replace(PLANNED, max_model_len=512)
    fitted = fit_pool(planned, measured, 0.5, page_bytes=PAGE_BYTES, is_estimate=True)
    assert fitted.num_pages == GIB // 2 // (2 * PAGE_BYTES) - 1


def test_recordings_are_estimated_by_the_two_largest():
    assert graphs_estimate([300, 10], 28) == 300 + 27 * 10
    assert graphs_estimate([300, -5], 28) == 300, "memory that came free meanwhile is no gain"
    assert graphs_estimate([300], 1) == 300
    assert graphs_estimate([], 28) == 0
