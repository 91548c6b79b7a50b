"""Whole models on Triton's operations, in its interpreter: what they say, and how many kernels a layer takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine.model_runner import load
from engine.model_runner.kernels import latent as plain_latent
from engine.model_runner.kernels import plain, plain_lora, whole_attention
from engine.model_runner.kernels import streams as plain_streams
from engine.model_runner.kernels.triton import activation, experts, norm, rotary_store, route, state_conv
from engine.model_runner.ops.ops import Ops
from engine.model_runner.states import plain as plain_delta_net
from engine.model_runner.states import plain as plain_mamba2
from engine.model_runner.weights import dummy
from engine.models.families.llama4 import FORM, NAMES, TEMPERATURE, routing
from engine.models.spec.experts_spec import ExpertsSpec, Routing
from engine.models.spec.layer_form import FOUR_NORMS, QK_NORMS, AttentionForm, WindowsSpec
from engine.models.spec.model_spec import ModelSpec
from engine.runtime.sampling_params import SamplingParams
from tests.conftest import HAS_NVIDIA_DRIVER
from tests.triton_interpreter import repair_interpreter

repair_interpreter()

pytestmark = pytest.mark.skipif(HAS_NVIDIA_DRIVER, reason="the models of these tests live on the CPU")

LLAMA = ModelSpec(
    model_type="llama",
    vocab_size=96,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    torch_dtype="float32",
)
SPECS = {
    "llama": LLAMA,
    "qwen3": msgspec.structs.replace(LLAMA, model_type="qwen3", form=QK_NORMS),
    "qwen3_moe": msgspec.structs.replace(
        LLAMA,
        model_type="qwen3_moe",
        form=QK_NORMS,
        experts=ExpertsSpec(
            num_experts=4, intermediate_size=24, routing=Routing(num_active=2, normalize=True)
        ),
    ),
    "gemma3": msgspec.structs.replace(
        LLAMA,
        model_type="gemma3_text",
        tie_word_embeddings=True,
        form=msgspec.structs.replace(FOUR_NORMS, qk_norm=True, float32_norms=True),
        windows=WindowsSpec(size=4, layers=(True, False), rope_theta=100.0),
        attention=AttentionForm(query_scale=0.3),
    ),
    "phi3": msgspec.structs.replace(LLAMA, model_type="phi3", rotary_dim=12),
    "llama4": msgspec.structs.replace(
        LLAMA,
        model_type="llama4_text",
        form=msgspec.structs.replace(FORM, unit_qk_norm=True),
        rope_layers=(True, False),
        windows=WindowsSpec(size=2, layers=(True, False)),
        attention=AttentionForm(chunked=True, temperature=msgspec.structs.replace(TEMPERATURE, length=2)),
        experts=ExpertsSpec(
            num_experts=4,
            intermediate_size=24,
            routing=routing(2),
            shared_size=24,
            scales_inputs=True,
            names=NAMES,
        ),
    ),
}
KERNELS = {
    norm: ("_rms_norm_kernel", "_add_rms_norm_kernel"),
    activation: ("_gate_and_mul_kernel",),
    rotary_store: ("_rotate_and_store_kernel",),
    route: ("_route_kernel",),
    experts: ("_align_kernel", "_product_kernel", "_combine_kernel"),
}


class Counted:
    """A kernel whose launches are counted."""

    def __init__(self, kernel: Any, count: Callable[[], None]) -> None:
        self._kernel = kernel
        self._count = count

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self._count()
        return self._kernel[grid]


@pytest.fixture(autouse=True, scope="module")
def loud_weights() -> Iterator[None]:
    """Dummy weights so large that every layer has a say in what comes out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dummy, "_BOUND", 0.5)
        yield


@pytest.fixture
def launches(monkeypatch) -> Counter[str]:
    """Launches by kernel, matrix products too, of a runner that is loaded with Triton's operations."""
    counts: Counter[str] = Counter()

    def count(name: str) -> Callable[[], None]:
        return lambda: counts.update([name])

    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, Counted(getattr(module, name), count(name.strip("_"))))

    def pack_linear(weight: torch.Tensor) -> Any:
        packed = plain.pack_linear(weight)

        def call(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            counts.update(["linear"])
            return packed(x, bias)

        return call

    ops = Ops(
        pack_linear=pack_linear,
        pack_experts=experts.pack_experts,
        route=route.route,
        rms_norm=norm.rms_norm,
        add_rms_norm=norm.add_rms_norm,
        silu_and_mul=activation.silu_and_mul,
        gelu_and_mul=activation.gelu_and_mul,
        gelu_erf_and_mul=plain.gelu_erf_and_mul,
        clamped_swiglu=plain.clamped_swiglu,
        layer_norm=plain.layer_norm,
        add_layer_norm=plain.add_layer_norm,
        activate=plain.activate,
        rotate_and_store=rotary_store.rotate_and_store,
        pack_heads=plain_latent.pack_heads,
        store_latent=plain_latent.store_latent,
        scale=plain.scale,
        soft_cap=plain.soft_cap,
        add=plain.add,
        add_gated=plain.add_gated,
        mul_sigmoid=plain.mul_sigmoid,
        take_rows=plain.take_rows,
        to_float32=plain.to_float32,
        short_conv=state_conv.short_conv,
        gated_delta=plain_delta_net.gated_delta,
        mamba2=plain_mamba2.mamba2,
        gelu_times=plain_streams.gelu_times,
        sparse_gelu_and_mul=plain_streams.sparse_gelu_and_mul,
        ids_below=plain_streams.ids_below,
        altup=plain_streams.PlainAltUp(),
        deltas=plain_lora.DELTAS,
        whole_attention=whole_attention.TorchWholeAttention,
    )
    monkeypatch.setattr(load, "select_ops", lambda _target: ops)
    return counts


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("qwen3_moe", "gemma3") else pytest.param(name, marks=pytest.mark.slow)
        for name in SPECS
    ],
)
def test_a_model_says_the_same_as_in_torch(make_driver, unpack, monkeypatch, launches, name):
    prompt = [5, 60, 33]
    found = []
    for with_triton in (True, False):
        if not with_triton:
            monkeypatch.undo()
        driver = make_driver(SPECS[name])
        req = driver.start(prompt, SamplingParams(temperature=0.0, logprobs=5, prompt_logprobs=5))
        first = unpack(driver.step([(req, len(prompt))]).prompt_logprobs[0])
        driver.step([(req, 1)])
        found.append((first, req.output))
    (triton_logprobs, triton_output), (torch_logprobs, torch_output) = found
    assert launches["rotate_and_store_kernel"] == 2 * SPECS[name].num_layers
    assert triton_output == torch_output
    assert np.std(torch_logprobs[2]) > 0.1
    np.testing.assert_allclose(triton_logprobs[0], torch_logprobs[0], atol=1e-5)
    np.testing.assert_allclose(triton_logprobs[2], torch_logprobs[2], atol=1e-5)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("name", "per_layer"),
    [
        # And one of attention: nine in all.
        (
            "qwen3",
            {"add_rms_norm_kernel": 2, "rotate_and_store_kernel": 1, "gate_and_mul_kernel": 1, "linear": 4},
        ),
        (
            "qwen3_moe",
            {
                "add_rms_norm_kernel": 2,
                "rotate_and_store_kernel": 1,
                "linear": 3,
                "route_kernel": 1,
                "align_kernel": 1,
                "product_kernel": 2,
                "combine_kernel": 1,
            },
        ),
    ],
)
def test_kernels_of_a_layer(make_driver, launches, name, per_layer):
    """The difference between models of three layers and of two."""
    taken = []
    for num_layers in (2, 3):
        driver = make_driver(msgspec.structs.replace(SPECS[name], num_layers=num_layers))
        req = driver.start([5])
        launches.clear()
        driver.step([(req, 1)])
        taken.append(Counter(launches))
    assert taken[1] - taken[0] == Counter(per_layer)
