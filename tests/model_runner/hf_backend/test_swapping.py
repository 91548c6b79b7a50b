"""Whole models of transformers with the engine's kernels inside: the same results, and recorded steps."""

from __future__ import annotations

import gc
import logging
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from engine.model_runner.hf_backend.swapping.modules import (
    MLP,
    Attention,
    Norm,
    PackedEmbedding,
    PackedHead,
    PackedLinear,
    RotaryTable,
)
from engine.model_runner.kernels.cpu.library import reasons_against_library
from engine.model_runner.recording.programs.forward_program import ProgrammedForward
from engine.runtime.sampling_params import SamplingParams

KINDS = {
    Attention: "attention",
    PackedEmbedding: "embedding",
    PackedHead: "head",
    PackedLinear: "linear",
    MLP: "mlp",
    Norm: "norm",
    RotaryTable: "rotary",
}
SHAPE = {"hidden_size": 96, "intermediate_size": 160}  # heads of 16
ALL_HEADS = {**SHAPE, "num_key_value_heads": 6}
WHOLE = {"attention": 2, "embedding": 1, "head": 1, "mlp": 2, "rotary": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "gpt_neox: fused projections, biases, parallel blocks": (
        "gpt_neox",
        {
            **ALL_HEADS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
        {**WHOLE, "norm": 5},
    ),
    "phi: a bias in the head, partial rotary": ("phi", ALL_HEADS, {**WHOLE, "norm": 3}),
    "gemma: unit offsets, scaled embedding, tied head": (
        "gemma",
        {**SHAPE, "tie_word_embeddings": True, "head_dim": 16},
        {**WHOLE, "norm": 5},
    ),
    "cohere: neighbors rotated together, scaled logits": ("cohere", SHAPE, {**WHOLE, "norm": 3}),
    "helium: the same with halves of angles": ("helium", {**SHAPE, "head_dim": 16}, {**WHOLE, "norm": 5}),
    "exaone4: head norms, some layers without rotary": (
        "exaone4",
        {
            **SHAPE,
            "num_hidden_layers": 4,
            "sliding_window": 17,
            "sliding_window_pattern": "LG",
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        {**WHOLE, "attention": 4, "mlp": 4, "norm": 9},
    ),
    "olmo: norms without weights": ("olmo", SHAPE, {**WHOLE, "norm": 5}),
    "olmo, clipped projections stay": (
        "olmo",
        {**SHAPE, "clip_qkv": 0.7},
        {**WHOLE, "attention": 0, "linear": 8, "norm": 5},
    ),
    "olmo2: norms of whole projections stay in attention": (
        "olmo2",
        SHAPE,
        {**WHOLE, "attention": 0, "linear": 8, "norm": 9},
    ),
    "granite: four scales": (
        "granite",
        {**SHAPE, "attention_multiplier": 0.0625, "logits_scaling": 4.0, "residual_multiplier": 0.3},
        {**WHOLE, "norm": 5},
    ),
    "opt: learned positions, scaled queries, no block of its own": (
        "opt",
        {**ALL_HEADS, "ffn_dim": 64, "word_embed_proj_dim": 96},
        {"attention": 2, "embedding": 1, "head": 1, "linear": 4, "norm": 5},
    ),
    "starcoder2: plain blocks": ("starcoder2", {**SHAPE, "sliding_window": 21}, {**WHOLE, "norm": 5}),
}
families = pytest.mark.parametrize(
    ("model_type", "options", "expected"), FAMILIES.values(), ids=[name.split(":")[0] for name in FAMILIES]
)
NOT_RECORDED = ("olmo, clipped projections stay", "olmo2", "opt")


def tokens_of(length: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(96) for _ in range(length)]


def modules_of(model: Any) -> list[nn.Module]:
    """All modules of the decoder and of what is around it."""
    return [*model._decoder.modules(), *model._causal_lm.modules()]


def swapped(driver: Any) -> dict[str, int]:
    """How many modules of each kind a model has."""
    counts: dict[str, int] = {}
    parts: set[nn.Module] = set()
    for module in modules_of(driver.runner.model):
        kind = KINDS.get(type(module))
        if kind is not None and module not in parts:
            counts[kind] = counts.get(kind, 0) + 1
            parts.update(module.modules())
    return counts


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
def test_in_bfloat16_they_are_as_close_to_the_exact_ones_and_steps_are_recorded(
    make_tiny_model, make_driver, unpack, model_type, options, expected, request
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
    is_recorded = request.node.callspec.id not in NOT_RECORDED
    assert isinstance(driver.native.eager.forward, ProgrammedForward) == is_recorded
    assert (driver.native.num_replayed > 0) == is_recorded


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_recorded_steps_equal_those_run_call_by_call(make_tiny_model, make_driver, kv_cache_dtype):
    if reasons := reasons_against_library():
        pytest.skip(reasons[0])
    tiny = make_tiny_model("phi", dtype="bfloat16", **ALL_HEADS)
    drivers = [
        make_driver(
            tiny.spec, tiny.folder, dtype="bfloat16", model_impl="transformers", kv_cache_dtype=kv_cache_dtype
        )
        for _ in range(2)
    ]
    drivers[1].run_eagerly()
    drivers[1].runner.executor.forward = drivers[1].runner.model.forward
    prompts = [tokens_of(length, seed=length) for length in (3, 40, 11)]

    recorded, eager = (driver.generate(prompts, num=8, chunk=16) for driver in drivers)

    assert recorded == eager
    assert drivers[0].native.num_replayed > 0


def test_a_tied_head_keeps_one_copy_of_the_table(make_tiny_model, make_driver):
    if reasons := reasons_against_library():
        pytest.skip(reasons[0])
    tiny = make_tiny_model("gemma", dtype="bfloat16", **SHAPE, tie_word_embeddings=True, head_dim=16)
    model = make_driver(tiny.spec, tiny.folder, dtype="bfloat16", model_impl="transformers").runner.model
    embedding = next(each for each in modules_of(model) if isinstance(each, PackedEmbedding))
    assert embedding._table is model._causal_lm.lm_head.packed
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


def test_attention_that_does_more_stays(make_tiny_model, make_driver, monkeypatch, unpack):
    from transformers.models.cohere import modeling_cohere

    plain = modeling_cohere.apply_rotary_pos_emb

    def rotated(q, k, cos, sin, **options):
        q, k = plain(q, k, cos, sin, **options)
        return q, 100 * torch.tanh(k / 100)

    monkeypatch.setattr(modeling_cohere, "apply_rotary_pos_emb", rotated)
    tiny = make_tiny_model("cohere", **SHAPE)
    driver = make_driver(tiny.spec, tiny.folder, model_impl="transformers")

    assert "attention" not in swapped(driver)
    prompt = tokens_of(30)
    found = logprobs_of(driver, unpack, prompt, [30])
    np.testing.assert_allclose(found, tiny.logprobs(prompt)[torch.arange(29), prompt[1:]], atol=1e-4)


def test_replaced_modules_are_freed_one_by_one(make_tiny_model, make_driver, monkeypatch):
    from engine.model_runner.hf_backend.swapping import swap

    kept: list[int] = []
    alive: weakref.WeakSet[nn.Linear] = weakref.WeakSet()
    replace = swap._Swapper._replace

    def counted(self: Any, old: nn.Module, new: nn.Module, kind: str) -> None:
        if not kept:
            alive.update(each for each in self._model.modules() if type(each) is nn.Linear)
        gc.collect()
        kept.append(len(alive))
        replace(self, old, new, kind)

    monkeypatch.setattr(swap._Swapper, "_replace", counted)
    tiny = make_tiny_model("phi", num_hidden_layers=4, **ALL_HEADS)
    gc.freeze()  # what other tests left is not looked through in each collection
    try:
        make_driver(tiny.spec, tiny.folder, model_impl="transformers")
    finally:
        gc.unfreeze()

    assert kept[0] == 4 * 6 + 1  # four in attention, two in the MLP, and the head
    assert kept[4] <= kept[0] - 2 * 4  # when the fourth layer's attention is replaced, two layers' are gone
    assert kept[8] <= kept[0] - 4 * 4 - 2 * 2
    gc.collect()
    assert not alive
