"""What fits, and what a client is told about what does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.launch.resolve.memory_budget import capacity_of
from engine.models.spec.model_spec import ModelSpec
from engine.runtime.config.config_sources import from_arguments, merge
from engine.runtime.feasibility import Capacity, max_new_tokens_for, pages_for, reason_against
from tests.feasible import fits

SPEC = ModelSpec(
    model_type="llama",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    torch_dtype="float32",
)


def capacity(max_model_len: int, num_pages: int, page_size: int) -> Capacity:
    return Capacity(max_model_len, num_pages, page_size, max_running_requests=8, vocab_size=100)


@given(
    prompt_len=st.integers(1, 200),
    max_new_tokens=st.integers(1, 200),
    max_model_len=st.integers(1, 200),
    num_pages=st.integers(1, 50),
    page_size=st.integers(1, 8),
)
def test_what_fits_has_a_position_for_each_token_and_a_slot_for_all_but_the_last(
    prompt_len, max_new_tokens, max_model_len, num_pages, page_size
):
    it = capacity(max_model_len, num_pages, page_size)
    total = prompt_len + max_new_tokens

    assert fits(prompt_len, max_new_tokens, it) == (
        total <= max_model_len and pages_for(total - 1, page_size) <= num_pages
    )


@given(prompt_len=st.integers(1, 200), max_model_len=st.integers(1, 200), num_pages=st.integers(1, 50))
def test_the_way_out_that_is_named_works(prompt_len, max_model_len, num_pages):
    it = capacity(max_model_len, num_pages, page_size=4)
    most = max_new_tokens_for(prompt_len, it)
    reason = reason_against(prompt_len, max(most, 0) + 1, it)

    assert reason is not None
    assert "shorten the prompt" in reason
    assert (f"lower max_tokens to {most} or" in reason) == (most >= 1)
    assert most < 1 or fits(prompt_len, most, it)


@pytest.mark.parametrize(
    ("prompt_len", "max_new_tokens", "words"),
    [
        (
            600,
            1,
            "the context holds 512, of which at least one is for the answer; shorten the prompt or raise",
        ),
        (
            300,
            1,
            "the prompt has 300 tokens and the KV pool holds 256; shorten the prompt or raise --max-total-tokens",
        ),
        (300, 400, "the KV pool holds 256; shorten the prompt or raise --max-total-tokens"),
        (100, 200, "299 KV slots, the KV pool has 256; shorten the prompt, lower max_tokens to 157 or raise"),
        (100, 500, "600 in all, the context holds 512; shorten the prompt, lower max_tokens to 157 or raise"),
    ],
)
def test_a_reason_names_the_sums_and_the_way_out(prompt_len, max_new_tokens, words):
    assert words in str(reason_against(prompt_len, max_new_tokens, capacity(512, 64, 4)))


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 2), ("float32", 4)])
@pytest.mark.parametrize("host_pages", [0, 0.5, 1, 7.9])
def test_capacity_has_the_pages_that_the_resolved_sizes_pay_for(dtype, width, host_pages):
    token_bytes = 2 * 3 * 2 * 16 * width
    settings = {
        "max_model_len": 64,
        "max_total_tokens": 103,
        "page_size": 4,
        "max_running_requests": 5,
        "dtype": dtype,
        "swap_space": host_pages * 4 * token_bytes / (1 << 30),
    }
    it = capacity_of(merge(from_arguments(settings)).config, SPEC)
    assert it == Capacity(64, 25, 4, 5, 100, num_host_pages=int(host_pages), kv_token_bytes=token_bytes)
