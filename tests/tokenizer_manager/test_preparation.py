from __future__ import annotations

import pytest

from engine.runtime.errors import RequestError
from engine.runtime.feasibility import Capacity
from engine.runtime.sampling_params import SamplingParams
from engine.tokenizer_manager.preparation import check_may_fit, resolve_length
from tests.feasible import fits
from tests.tokenizer_manager.fake_engine import TOKENIZER

CAPACITY = Capacity(max_model_len=100, num_pages=20, page_size=4, max_running_requests=8, vocab_size=258)


def resolve(prompt_len: int, max_new_tokens: int | None, *, min_new_tokens: int = 0) -> int | None:
    sampling = SamplingParams(max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens)
    resolved = resolve_length(
        sampling, prompt_len, CAPACITY, prompt_param="prompt", length_param="max_tokens"
    )
    return resolved.max_new_tokens


def test_without_a_length_the_answer_may_be_as_long_as_fits():
    longest = resolve(10, None)

    assert longest == 71  # 80 slots, and the last token needs none
    assert fits(10, 71, CAPACITY)
    assert not fits(10, 72, CAPACITY)


@pytest.mark.fast_cases(60)
@pytest.mark.parametrize("prompt_len", range(1, 100))
@pytest.mark.parametrize("asked", [1, 2, 30, 99])
def test_what_is_accepted_is_exactly_what_fits(prompt_len, asked):
    if fits(prompt_len, asked, CAPACITY):
        assert resolve(prompt_len, asked) == asked
    else:
        with pytest.raises(RequestError) as caught:
            resolve(prompt_len, asked)
        assert caught.value.code == "context_length_exceeded"


def test_the_field_at_fault_is_named():
    with pytest.raises(RequestError, match="lower max_tokens") as too_long_an_answer:
        resolve(10, 95)
    with pytest.raises(RequestError, match="81 tokens") as too_long_a_prompt:
        resolve(81, None)
    with pytest.raises(RequestError, match="100 tokens") as too_long_for_any_answer:
        resolve(100, 5)
    with pytest.raises(RequestError, match="has no tokens") as empty:
        resolve(0, 5)

    assert too_long_an_answer.value.param == "max_tokens"
    assert too_long_a_prompt.value.param == "prompt"
    assert too_long_for_any_answer.value.param == "prompt"
    assert empty.value.param == "prompt"


def test_min_tokens_beyond_what_can_be_generated_is_refused():
    with pytest.raises(RequestError, match="min_new_tokens is 72, but only 71") as caught:
        resolve(10, None, min_new_tokens=72)

    assert caught.value.param == "min_new_tokens"


@pytest.mark.parametrize("prompt_len", [79, 80, 81, 99, 100])
def test_a_text_is_refused_untokenized_only_if_no_tokenizing_could_make_it_fit(prompt_len):
    """A token of the longest kind, `<|im_start|>`, is 12 bytes; 80 tokens fit."""
    text = "<|im_start|>" * prompt_len
    assert len(TOKENIZER.encode(text)) == prompt_len
    if fits(prompt_len, 1, CAPACITY):
        check_may_fit(text, TOKENIZER, CAPACITY, "prompt")
    else:
        with pytest.raises(RequestError, match=f"at least {prompt_len} tokens, but at most 80 fit") as caught:
            check_may_fit(text, TOKENIZER, CAPACITY, "prompt")
        assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


def test_the_prompt_of_a_list_is_named():
    with pytest.raises(RequestError, match=r"^prompt\[3\] has 100 tokens") as caught:
        resolve_length(
            SamplingParams(max_new_tokens=1),
            100,
            CAPACITY,
            prompt_param="prompt[3]",
            length_param="max_tokens",
        )

    assert caught.value.param == "prompt[3]"
