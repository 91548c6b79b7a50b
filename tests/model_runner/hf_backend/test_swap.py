"""Whole models of transformers with the engine's kernels inside compute the same."""

from __future__ import annotations

import gc
import logging
import random
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from engine.model_runner import op_selection
from engine.model_runner.hf_backend import transformers_check
from engine.model_runner.hf_backend.swap import KernelModule, swap_modules
from engine.model_runner.kernels.cpu.library import reasons_against_library
from engine.model_runner.ops.ops import Ops
from engine.models.spec.model_spec import ModelSpec
from engine.runtime.sampling_params import SamplingParams

SHAPE = {"hidden_size": 96, "intermediate_size": 160}  # heads of 16
ALL_HEADS = {**SHAPE, "num_key_value_heads": 6}
WHOLE = {"embedding": 1, "head": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "gpt_neox: fused projections, biases, parallel blocks": (
        "gpt_neox",
        {
            **ALL_HEADS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
        {**WHOLE, "linear": 8, "norm": 5},
    ),
    "gpt2: transposed weights, learned positions": (
        "gpt2",
        {"n_inner": 80, **ALL_HEADS},
        {"embedding": 2, "head": 1, "linear": 8, "norm": 5},
    ),
    "phi: a bias in the head, partial rotary": ("phi", ALL_HEADS, {**WHOLE, "linear": 12, "norm": 3}),
    "gemma: unit offsets, scaled embedding, tied head": (
        "gemma",
        {**SHAPE, "tie_word_embeddings": True, "head_dim": 16},
        {**WHOLE, "linear": 14, "norm": 5},
    ),
    "cohere: layer norms of its own stay": ("cohere", SHAPE, {**WHOLE, "linear": 14}),
    "helium: neighbors rotated together": (
        "helium",
        {**SHAPE, "head_dim": 16},
        {**WHOLE, "linear": 14, "norm": 5},
    ),
    "exaone4: head norms, some layers without rotary": (
        "exaone4",
        {
            **SHAPE,
            "num_hidden_layers": 4,
            "sliding_window": 17,
            "sliding_window_pattern": "LG",
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        {**WHOLE, "linear": 28, "norm": 17},
    ),
    "olmo, clipped projections, norms without weights": (
        "olmo",
        {**SHAPE, "clip_qkv": 0.7},
        {**WHOLE, "linear": 14},
    ),
    "olmo2: norms of whole projections": ("olmo2", SHAPE, {**WHOLE, "linear": 14, "norm": 9}),
    "granite: four scales": (
        "granite",
        {**SHAPE, "attention_multiplier": 0.0625, "logits_scaling": 4.0, "residual_multiplier": 0.3},
        {**WHOLE, "linear": 14, "norm": 5},
    ),
    "opt: learned positions, scaled queries, no block of its own": (
        "opt",
        {**ALL_HEADS, "ffn_dim": 64, "word_embed_proj_dim": 96},
        {**WHOLE, "linear": 12, "norm": 5},
    ),
    "starcoder2: plain blocks": (
        "starcoder2",
        {**SHAPE, "sliding_window": 21},
        {**WHOLE, "linear": 12, "norm": 5},
    ),
}
families = pytest.mark.parametrize(
    ("model_type", "options", "expected"), FAMILIES.values(), ids=[name.split(":")[0] for name in FAMILIES]
)


def scaled_first(norm, x):
    return norm.normalized(x * norm.weight)


def in_groups(norm, x):
    return norm.normalized(x.unflatten(-1, (2, -1))).flatten(-2) * norm.weight


def over_tokens(norm, x):
    return x * torch.rsqrt(x.square().mean((-2, -1), keepdim=True) + norm.eps) * norm.weight


NORMS: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], bool]] = {
    "weight": (lambda norm, x: norm.normalized(x) * norm.weight, True),
    "one and weight": (lambda norm, x: norm.normalized(x) * (1.0 + norm.weight), True),
    "scaled before it is normalized": (scaled_first, False),
    "normalized in groups": (in_groups, False),
    "of all heads together": (over_tokens, False),
    "eps outside of the root": (
        lambda norm, x: x / (x.square().mean(-1, keepdim=True).sqrt() + norm.eps) * norm.weight,
        False,
    ),
    "centered": (lambda norm, x: norm.normalized(x - x.mean(-1, keepdim=True)) * norm.weight, False),
    "absolute weights": (lambda norm, x: norm.normalized(x) * norm.weight.abs(), False),
    "clamped": (lambda norm, x: norm.normalized(x.clamp(-100.0, 100.0)) * norm.weight, False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("compute", "is_known"), NORMS.values(), ids=NORMS)
def test_a_norm_is_replaced_if_it_computes_the_known_arithmetic(compute, is_known, dtype):
    class SomeRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.randn(16)), 1e-5

        def normalized(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = compute(self, x.float()).to(x.dtype)
            return found

    model, x = Model(SomeRMSNorm(), dtype), torch.randn(1, 5, 3, 16).to(dtype)
    expected = model.norm(x)

    swap_modules(model, ops_of(dtype))

    assert isinstance(model.norm, KernelModule) == is_known
    torch.testing.assert_close(model.norm(x), expected)


def test_norms_of_transformers_with_another_arithmetic_stay():
    spark = pytest.importorskip("transformers.models.muse_spark.modeling_muse_spark")
    qwen = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    hooked = nn.Linear(16, 16)
    hooked.register_forward_hook(lambda *_: None)
    for stays in (
        spark.MuseSparkTextInputScaledRMSNorm(16),
        qwen.Qwen4ExpTextRMSNorm(16, group_size=8),
        qwen.Qwen4ExpTextRMSNormGated(16),
        hooked,
    ):
        nn.init.normal_(stays.weight)
        model = Model(stays, torch.float32)
        swap_modules(model, ops_of(torch.float32))
        assert model.norm is stays


def ops_of(dtype: torch.dtype) -> Ops:
    spec = ModelSpec(
        model_type="llama",
        vocab_size=96,
        hidden_size=16,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        torch_dtype="float32",
        eos_token_ids=(),
    )
    return op_selection.select_ops(op_selection.Target(spec, torch.device("cpu"), dtype))


class Model(nn.Module):
    """A model with one module of interest."""

    def __init__(self, norm: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm, self.dtype = norm.to(dtype), dtype

    def get_output_embeddings(self) -> None: ...


def tokens_of(length: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(96) for _ in range(length)]


def swapped(driver: Any) -> dict[str, int]:
    """How many modules of each kind a model has."""
    model = driver.runner.model
    modules = {*model._decoder.modules(), *model._causal_lm.modules()}
    return dict(Counter(each.kind for each in modules if isinstance(each, KernelModule)))


def logprobs_of(driver: Any, unpack: Any, prompt: list[int], chunks: list[int]) -> np.ndarray:
    req = driver.start(prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    found = [unpack(driver.step([(req, chunk)]).prompt_logprobs[0])[0] for chunk in chunks]
    return np.concatenate(found)


@pytest.mark.fast_cases(2)
@families
def test_logprobs_and_decodes_are_those_of_transformers(
    make_tiny_model, make_driver, unpack, model_type, options, expected
):
    tiny = make_tiny_model(model_type, **options)
    driver = make_driver(tiny.spec, tiny.folder, model_impl="transformers")
    prompt = tokens_of(61)

    found = logprobs_of(driver, unpack, prompt, [40, 21])
    outputs = driver.generate([tokens_of(5, seed=1), tokens_of(33, seed=2)], num=6, chunk=20)

    assert swapped(driver) == {kind: number for kind, number in expected.items() if number}
    np.testing.assert_allclose(found, tiny.logprobs(prompt)[torch.arange(60), prompt[1:]], atol=1e-4)
    assert outputs == [tiny.greedy(tokens_of(5, seed=1), 6), tiny.greedy(tokens_of(33, seed=2), 6)]


@pytest.mark.fast_cases(1)
@families
def test_in_bfloat16_they_are_as_close_to_the_exact_ones(
    make_tiny_model, make_driver, unpack, model_type, options, expected
):
    if reasons := reasons_against_library():
        pytest.skip(reasons[0])
    tiny = make_tiny_model(model_type, dtype="bfloat16", **options)
    driver = make_driver(tiny.spec, tiny.folder, dtype="bfloat16", model_impl="transformers")
    prompt = tokens_of(60)
    theirs = tiny.logprobs(prompt)[torch.arange(59), prompt[1:]].numpy()
    tiny.reference.float()
    exact = tiny.logprobs(prompt)[torch.arange(59), prompt[1:]].numpy()

    ours = logprobs_of(driver, unpack, prompt, [60])
    req = driver.start(prompt)
    driver.step([(req, 60)])
    for _ in range(4):
        driver.step([(req, 1)])

    assert swapped(driver) == {kind: number for kind, number in expected.items() if number}
    assert np.abs(ours - exact).mean() < 1.25 * np.abs(theirs - exact).mean() + 1e-3
    replayed = tiny.logprobs(req.tokens)[range(len(prompt) - 1, len(req.tokens) - 1), req.output]
    assert float(tiny.logprobs(req.tokens)[len(prompt) - 1 : -1].amax(-1).sub(replayed).max()) < 0.2


def count_packed(monkeypatch: Any, note: Callable[[torch.Tensor], None]) -> None:
    """Call `note` with each weight that is packed for a model of transformers."""
    select = op_selection.select_ops

    def selected(*args: Any) -> Any:
        ops = select(*args)

        def pack(weight: torch.Tensor) -> Any:
            note(weight)
            return ops.pack_linear(weight)

        return replace(ops, pack_linear=pack)

    monkeypatch.setattr("engine.model_runner.load.select_ops", selected)


def test_a_tied_head_keeps_one_copy_of_the_table(make_tiny_model, make_driver):
    if reasons := reasons_against_library():
        pytest.skip(reasons[0])
    tiny = make_tiny_model("gemma", dtype="bfloat16", **SHAPE, tie_word_embeddings=True, head_dim=16)
    driver = make_driver(tiny.spec, tiny.folder, dtype="bfloat16", model_impl="transformers")
    model = driver.runner.model
    assert swapped(driver)["embedding"] == 1
    assert not any(list(each.parameters()) for each in (model._decoder, model._causal_lm))


def test_a_model_whose_code_reads_weights_runs_unchanged(
    make_tiny_model, make_driver, monkeypatch, unpack, caplog
):
    from transformers.models.starcoder2 import modeling_starcoder2

    plain = modeling_starcoder2.Starcoder2DecoderLayer.forward

    def forward(self, hidden_states, *args, **options):
        return plain(self, hidden_states.to(self.mlp.c_fc.weight.dtype), *args, **options)

    monkeypatch.setattr(modeling_starcoder2.Starcoder2DecoderLayer, "forward", forward)
    tiny = make_tiny_model("starcoder2", **SHAPE)
    with caplog.at_level(logging.WARNING):
        driver = make_driver(tiny.spec, tiny.folder, model_impl="transformers")

    assert swapped(driver) == {}
    assert (
        "Starcoder2ForCausalLM cannot run with the engine's kernels in it, so it runs more slowly: AttributeError"
        in caplog.text
    )
    prompt = tokens_of(30)
    found = logprobs_of(driver, unpack, prompt, [30])
    np.testing.assert_allclose(found, tiny.logprobs(prompt)[torch.arange(29), prompt[1:]], atol=1e-4)


def test_replaced_modules_are_freed_one_by_one(make_tiny_model, make_driver, monkeypatch):
    kept: list[int] = []
    alive: weakref.WeakSet[nn.Linear] = weakref.WeakSet()
    check = transformers_check.ModelCheck

    def checked(causal_lm: Any, *args: Any) -> Any:
        alive.update(each for each in causal_lm.modules() if type(each) is nn.Linear)
        return check(causal_lm, *args)

    def count(weight: torch.Tensor) -> None:
        gc.collect()
        kept.append(len(alive))

    monkeypatch.setattr("engine.model_runner.hf_backend.transformers_load.ModelCheck", checked)
    count_packed(monkeypatch, count)
    tiny = make_tiny_model("phi", num_hidden_layers=4, **ALL_HEADS)
    gc.freeze()  # what other tests left is not looked through in each collection
    try:
        make_driver(tiny.spec, tiny.folder, model_impl="transformers")
    finally:
        gc.unfreeze()

    total = 4 * 6 + 1  # four in attention, two in the MLP, and the head
    assert len(kept) == total and kept[0] == total
    assert all(found <= total - done + 1 for done, found in enumerate(kept))
    gc.collect()
    assert not alive
