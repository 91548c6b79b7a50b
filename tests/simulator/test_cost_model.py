"""More work never takes less time, and known figures come out."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.models.weight_files.weight_memory import weight_bytes
from engine.runtime.errors import ConfigError
from engine.scheduler.batch import StepWork
from engine.simulator.cost_model import Roofline
from engine.simulator.facts import DEVICES, MODELS, ModelFacts
from engine.simulator.fitted import MIN_STEPS, Fitted, MeasuredStep
from tests.selection import examples
from tests.simulator.linear_cost import LinearCost

COUNTS = st.integers(0, 100_000)
WORK = st.builds(
    StepWork,
    prefill_tokens=COUNTS,
    prefill_pairs=st.floats(0, 1e9),
    decode_rows=st.integers(0, 4096),
    kv_tokens=st.integers(0, 10_000_000),
    num_sampled=st.integers(0, 4096),
    swapped_tokens=COUNTS,
)


@given(work=WORK, more=WORK, device=st.sampled_from(sorted(DEVICES)), model=st.sampled_from(sorted(MODELS)))
def test_more_work_never_takes_less(work, more, device, model):
    cost = Roofline(MODELS[model], DEVICES[device])
    both = StepWork(*(one + other for one, other in zip(work, more, strict=True)))
    assert cost.step_s(both) >= cost.step_s(work) >= DEVICES[device].step_overhead_s


def test_sizes_of_llama_8b():
    facts = MODELS["llama-3.1-8b"]
    assert facts.weight_bytes == pytest.approx(16.06e9, rel=0.001)  # 8.03 B parameters of 2 bytes
    assert facts.kv_token_bytes == 131_072  # 2 · 32 layers · 8 heads · 128 · 2 bytes


def test_decoding_alone_reads_the_weights_once():
    device = dataclasses.replace(DEVICES["h200"], bandwidth_share=1.0, compute_share=1.0, step_overhead_s=0.0)
    cost = Roofline(MODELS["llama-3.1-8b"], device)
    # (16.06 GB - 1.05 GB of embeddings, of which one row is read) / 4.8 TB/s = 3.1 ms, and KV of 1,000 tokens
    kv_s = 1000 * 131_072 / 4.8e12
    assert cost.step_s(StepWork(0, 0, 1, 1000, 1)) == pytest.approx(0.00313 + kv_s, rel=0.01)


def test_a_long_prompt_is_bound_by_arithmetic():
    device = dataclasses.replace(DEVICES["h100"], compute_share=1.0, step_overhead_s=0.0)
    cost = Roofline(MODELS["llama-3.1-8b"], device)
    # 2 · 6.98 B layer parameters · 8,192 tokens / 989.5 TFLOP/s = 115.6 ms; attention: 4 · 32 · 32 · 128 · 8192²/2
    attention_s = 4 * 32 * 32 * 128 * 8192 * 8192 / 2 / 989.5e12
    step_s = cost.step_s(StepWork(8192, 8192 * 8192 / 2, 0, 0, 1))
    assert step_s == pytest.approx(0.1156 + attention_s, rel=0.005)


def test_several_devices_share_the_work_and_pay_for_talking():
    one, four = DEVICES["h200"], DEVICES["h200"].times(4)
    model = MODELS["llama-3.1-70b"]
    work = StepWork(4096, 1e7, 64, 100_000, 65)
    assert Roofline(model, one).step_s(work) / 4 < Roofline(model, four).step_s(work)
    assert Roofline(model, four).step_s(work) < Roofline(model, one).step_s(work) / 3
    assert one.times(1) is one


def test_swapping_costs_the_way_to_the_host():
    cost = Roofline(MODELS["llama-3.1-8b"], DEVICES["a100"])
    idle, swap = StepWork(0, 0, 1, 0, 1), StepWork(0, 0, 1, 0, 1, swapped_tokens=1000)
    assert cost.step_s(swap) - cost.step_s(idle) == pytest.approx(1000 * 131_072 / (32e9 * 0.8))


def random_steps(cost: LinearCost, noise: float = 0.0, count: int = 400) -> list[MeasuredStep]:
    rng = np.random.default_rng(0)
    steps = []
    for _ in range(count):
        prefill = int(rng.integers(0, 2000)) * int(rng.random() < 0.3)
        rows = int(rng.integers(1, 64))
        work = StepWork(
            prefill, prefill * float(rng.integers(100, 1000)), rows, rows * int(rng.integers(50, 900)), rows
        )
        steps.append(MeasuredStep(work, cost.step_s(work) * (1 + noise * float(rng.standard_normal()))))
    return steps


TRUTH = LinearCost(step_s=0.004, prefill_token_s=2e-5, decode_row_s=3e-5, kv_token_s=4e-8, pair_s=1e-9)


def test_fitting_finds_the_model_that_made_the_steps():
    fitted = Fitted.to(random_steps(TRUTH))
    for work in (StepWork(1000, 5e5, 0, 0, 1), StepWork(0, 0, 64, 50_000, 64), StepWork(0, 0, 1, 10, 1)):
        assert fitted.step_s(work) == pytest.approx(TRUTH.step_s(work), rel=1e-6)
    assert fitted.quality.r_squared == pytest.approx(1.0)
    assert fitted.quality.p90_error < 1e-6


def test_fitting_says_how_noisy_the_steps_were():
    fitted = Fitted.to(random_steps(TRUTH, noise=0.1))
    assert 0.05 < fitted.quality.median_error < 0.09  # the median of |N(0, 0.1)| is 0.067
    assert 0.9 < fitted.quality.r_squared < 1.0
    work = StepWork(0, 0, 32, 10_000, 32)
    assert fitted.step_s(work) == pytest.approx(TRUTH.step_s(work), rel=0.05)


@settings(max_examples=examples(100))
@given(work=WORK, more=WORK, seed=st.integers(0, 100))
def test_a_fitted_model_never_lets_more_work_take_less(work, more, seed):
    rng = np.random.default_rng(seed)
    steps = [
        MeasuredStep(step.work, float(rng.uniform(0.001, 0.1))) for step in random_steps(TRUTH, count=30)
    ]
    fitted = Fitted.to(steps)
    both = StepWork(*(one + other for one, other in zip(work, more, strict=True)))
    assert fitted.step_s(both) >= fitted.step_s(work) >= 0


def test_too_few_steps_say_nothing():
    with pytest.raises(ConfigError, match=f"has 3 steps with tokens, but a cost model needs {MIN_STEPS}"):
        Fitted.to(random_steps(TRUTH, count=3))


def test_time_between_steps_and_of_swaps_is_added():
    fitted = Fitted.to(random_steps(TRUTH), overhead_s=0.5, swapped_token_s=0.25)
    work = StepWork(0, 0, 8, 1000, 8)
    assert fitted.step_s(work) == pytest.approx(TRUTH.step_s(work) + 0.5)
    assert fitted.step_s(work._replace(swapped_tokens=4)) == pytest.approx(TRUTH.step_s(work) + 1.5)


def test_facts_of_a_model_whose_files_are_here():
    from engine.models.spec.model_spec import ModelSpec

    spec = ModelSpec(
        model_type="llama",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
    )
    assert ModelFacts.of("smollm2-135m", spec) == MODELS["smollm2-135m"]
    assert MODELS["smollm2-135m"].weight_bytes == pytest.approx(weight_bytes(spec, 2), rel=0.001)
