"""Bad words, allowed tokens, and what ends an answer besides stop strings, over the real parts and a tiny model."""

from __future__ import annotations

import re
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.runtime.sampling_params import RepetitionDetection

LETTERS = "abcdefgh"


@pytest.fixture(scope="module")
def llm(tiny_model):
    with LLM(str(tiny_model), dtype="float32", num_threads=1, max_running_requests=8) as llm:
        yield llm


def ids_of(llm: LLM, text: str) -> tuple[int, ...]:
    return tuple(llm.tokenizer.encode(text, add_special_tokens=False))


def answers(llm: LLM, params: list[SamplingParams], **options: Any) -> Any:
    return llm.generate(["hi there"] * len(params), params, **options)


def test_an_answer_has_allowed_tokens_only_and_no_bad_word(llm):
    allowed = ids_of(llm, LETTERS)
    common: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True, "allowed_token_ids": allowed}
    params = [
        SamplingParams(seed=1, **common),
        SamplingParams(seed=1, bad_words=("ac", "h", "bgf"), **common),
        SamplingParams(seed=2, typical_p=0.9, bad_words=("ac",), **common),
        SamplingParams(seed=3, max_new_tokens=60, ignore_eos=True),
    ]
    plain, without, rare, free = (each.text for each in answers(llm, params))
    assert set(plain + without + rare) <= set(LETTERS)
    assert not set(free) <= set(LETTERS)
    assert "ac" in plain and "h" in plain
    assert not re.search("ac|h|bgf", without) and {"a", "c"} <= set(without)
    assert "ac" not in rare


def test_allowed_tokens_are_joined_with_those_of_a_grammar(llm):
    params = SamplingParams(seed=1, max_new_tokens=30, allowed_token_ids=(*ids_of(llm, "abx"), 2))
    (answer,) = answers(llm, [params], regex="[a-z]{5,9}")
    assert re.fullmatch("[abx]{5,9}", answer.text)
    (answer,) = answers(llm, [SamplingParams(seed=1, allowed_token_ids=ids_of(llm, "q"))], regex="[a-c]{5,9}")
    assert (answer.text, answer.finish_reason) == ("", "error")
    assert answer.error.startswith("the grammar cannot continue after 0 tokens")


def test_tokens_that_exclude_each_other_end_the_answer_with_a_reason(llm):
    params = SamplingParams(seed=1, allowed_token_ids=ids_of(llm, "q"), bad_words=("q",))
    (answer,) = answers(llm, [params])
    assert (answer.text, answer.finish_reason) == ("", "error")
    assert answer.error.startswith("allowed_token_ids leaves no token")


def test_an_answer_ends_at_a_match_or_a_repetition(llm):
    common: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True, "seed": 1}
    letters = ids_of(llm, LETTERS)
    regex, repeated = answers(
        llm,
        [
            SamplingParams(stop_regex=("[ab][cd]",), allowed_token_ids=letters, **common),
            SamplingParams(
                repetition_detection=RepetitionDetection(max_pattern_size=1, min_count=7),
                allowed_token_ids=letters[:1],
                **common,
            ),
        ],
    )
    assert re.fullmatch("(?:(?![ab][cd]).)*[ab][cd]", regex.text)
    assert (regex.finish_reason, repeated.finish_reason) == ("stop", "stop")
    assert repeated.text == "a" * 7
