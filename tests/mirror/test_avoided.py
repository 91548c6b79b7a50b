"""`--avoid-kernels` on the mirror: with any one component avoided, a model loads with its recordings and serves."""

from __future__ import annotations

import pytest

from engine.model_runner.load import avoidable_components
from tests.model_runner.structures.families import FAMILIES

from .mirror import mirror_device
from .runners import load_driver
from .scenarios import assert_same
from .test_structures import life, spec_of

MODELS = {
    "llama": (
        *("triton:rms_norm", "triton:add_rms_norm", "triton:silu_and_mul", "triton:rotate_and_store"),
        *("triton:sample", "triton:attention", "prompt_graphs", "decode_graphs", "sampler_graphs"),
    ),
    "gemma2 low caps": ("triton:gelu_and_mul",),
    "qwen3_moe": ("triton:route", "triton:pack_experts"),
    "qwen3_next": ("triton:gated_delta",),
    "lfm2": ("triton:short_conv",),
    "mamba2 dense, no rotary": ("triton:mamba2",),
}
"""The avoided components, by the row of `families.py` that uses it."""
ELSEWHERE = {"triton", "triton:linear_fp8", "triton:linear_int4", "pdl", "torch._scaled_mm"}
"""All of Triton: `test_structures.py`. Quantized weights, and what only sgl-kernel has: not on the mirror."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "avoided"),
    [pytest.param(name, each, id=f"{name}-{each}") for name, avoided in MODELS.items() for each in avoided],
)
def test_a_model_without_one_component_gives_the_tokens_of_the_cpu(name, avoided, tmp_path):
    spec = spec_of(FAMILIES[name], tmp_path)
    expected = life(load_driver(spec, None))
    with mirror_device() as mirror:
        assert_same(life(load_driver(spec, mirror, chunk=16, avoid_kernels=(avoided,))), expected)
        if avoided == "triton:pack_experts":  # see `test_structures.py`
            details = {fault.detail for fault in mirror.faults.take()}
            assert details == {"grouped_mm multiplies group by group"}


def test_every_component_of_triton_and_the_runner_is_avoided_once():
    components = avoidable_components()
    names = {*components["of triton"], *components["of the runner"], "triton"}
    assert names - ELSEWHERE == {each for avoided in MODELS.values() for each in avoided}
