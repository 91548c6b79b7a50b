"""The comparison with golden answers, and that of two results of an operator."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.gpu.golden import MOST_ERROR, TIE, Answer, compare
from benchmarks.gpu.sections import flags_of
from benchmarks.gpu.tensor_difference import cloned, difference_of
from benchmarks.gpu.triage import SWITCHES, _kernels_of, _last_place, settings_of
from engine.model_runner.load import avoidable_components

GOLDEN = Answer([5, 6], {"temperature": 0.0}, [1, 2, 3], [-0.1, -0.2, -0.3], [2.0, TIE / 2, 2.0])


def test_equal_answers_pass() -> None:
    verdict = compare([GOLDEN], [replace(GOLDEN, logprobs=[-0.2, -0.2, -0.2])])
    assert verdict.reason == "" and verdict.compared == 3
    assert verdict.error == pytest.approx(0.2 / 3)


def test_another_token_is_right_at_a_near_tie_and_ends_the_comparison() -> None:
    verdict = compare([GOLDEN], [replace(GOLDEN, tokens=[1, 9, 9], logprobs=[-0.1, -9.0, -9.0])])
    assert verdict.reason == "" and verdict.compared == 1


def test_another_token_elsewhere_is_wrong() -> None:
    verdict = compare([GOLDEN, GOLDEN], [GOLDEN, replace(GOLDEN, tokens=[9, 2, 3])])
    assert verdict.reason == (
        "1 answers are wrong, the first: request 1 (2 tokens, temperature=0.0): token 0 is 9, not 1, "
        "which was better by 2.00"
    )


@pytest.mark.parametrize("logprob", [-0.1 - 4 * MOST_ERROR, math.nan])
def test_log_probabilities_that_are_off_are_wrong(logprob: float) -> None:
    found = replace(GOLDEN, logprobs=[logprob, -0.2, -0.3])
    assert "log-probabilities are off" in compare([GOLDEN], [found]).reason


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_switch_is_a_name_of_the_product(device: str) -> None:
    known = {name for names in avoidable_components().values() for name in names}
    assert set(SWITCHES[device]) - known == {"overlap"}


def test_the_kernels_of_every_triton_switch_are_sent_home() -> None:
    ops = [name.partition(":")[2] for name in SWITCHES["cuda"] if name.startswith("triton:")]
    assert all(any(name.endswith("_kernel") for name in _kernels_of(op)) for op in ops)
    assert "_add_rms_norm_kernel" in _kernels_of("add_rms_norm") and _kernels_of("decode_graphs") == []


def test_the_place_of_a_crash_is_the_innermost_frame_of_the_engine() -> None:
    log = (
        'Thread 0x7f01 (most recent call first):\n  File "/x/engine/scheduler/other.py", line 3 in wait\n\n'
        'Current thread 0x7f00 (most recent call first):\n  File "/x/torch/_ops.py", line 8 in __call__\n'
        '  File "/x/engine/model_runner/layers/mlp.py", line 12 in forward\n'
        '  File "/x/engine/model_runner/load.py", line 40 in load\n'
    )
    assert _last_place(log) == "model_runner/layers/mlp.py:12 in forward"
    assert _last_place("CUDA error\n\n") == "CUDA error" and _last_place("") == "no output"


def test_switches_become_settings_and_flags() -> None:
    settings = settings_of(["overlap", "fa3", "triton:route"])
    assert settings == {"avoid_kernels": ["fa3", "triton:route"], "overlap": False}
    assert flags_of(settings) == ["--avoid-kernels", "fa3,triton:route", "--no-overlap"]
    assert flags_of(settings_of([])) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({1: 2.01}, ""),  # bfloat16
        ({1: 7.0}, "1 of 4 differ, most at (0, 1): 7, not 2"),
        ({3: math.nan}, "most at (1, 1): nan, not 4"),
        ({2: math.inf}, "most at (1, 0): inf, not 3"),
    ],
)
def test_numbers_differ_beyond_rounding(change: dict[int, float], reason: str) -> None:
    expected = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    found = expected.clone()
    for at, value in change.items():
        found.view(-1)[at] = value
    text = difference_of((None, found), (None, expected))
    assert reason in text and bool(text) == bool(reason)


def test_what_is_not_finite_in_both_is_equal() -> None:
    both = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    assert difference_of(both, both.clone()) == ""


def test_tokens_and_shapes_are_compared_exactly() -> None:
    tokens = torch.tensor([3, 4])
    assert (
        difference_of(tokens, torch.tensor([3, 5])) == "result 0: 1 of 2 differ, the first at (1,): 4, not 5"
    )
    assert difference_of(tokens, tokens[:1]) == "result 0: shape (2,), not (1,)"


def test_a_copy_has_the_strides_of_its_original() -> None:
    original: Any = torch.arange(12.0).view(3, 4)[:, 1:3]
    (copied,) = cloned((original,))
    assert copied.stride() == original.stride() and bool((copied == original).all())
    original.zero_()
    assert bool((copied != 0).all())
