"""Architecture facts from GGUF metadata and tensors."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.models.gguf.gguf_file import GGUFFile
from engine.models.gguf_config import read_gguf_spec
from engine.models.spec.layer_form import RopeScaling
from engine.models.spec.model_spec import ModelSpec
from engine.runtime.errors import ConfigError

MakeGGUF = Callable[..., Path]
LONGROPE = {"llama__rope__scaling__original_context_length": 128}
FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")

METADATA: dict[str, Any] = {
    "llama.block_count": 2,
    "llama.context_length": 256,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 0.125,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": 8,
    "llama.vocab_size": 128,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def read(
    make_gguf: MakeGGUF, tensors: dict[str, Any] | None = None, arch: str = "llama", **changes: Any
) -> ModelSpec:
    """Read METADATA with changes (`__` stands for a dot; a value of `...` removes the key)."""
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    metadata = {key: value for key, value in (METADATA | dotted).items() if value is not ...}
    return read_gguf_spec(GGUFFile(make_gguf(metadata, tensors, arch=arch)))


def llama3_divisors(factor: float, head_dim: int, theta: float) -> np.ndarray:
    """The tensor that llama.cpp's conversion writes for Llama 3 models, one frequency at a time."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192 / 1:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


def test_all_facts_are_read(make_gguf: MakeGGUF) -> None:
    assert read(make_gguf) == ModelSpec(
        model_type="llama",
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=0.125,
        rope_theta=10000.0,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
        eos_token_ids=(2,),
        bos_token_id=1,
    )


def test_tensors_tell_vocabulary_head_biases_and_dtype(make_gguf: MakeGGUF) -> None:
    tensors = {
        "token_embd.weight": np.zeros((130, 32), np.float32),
        "output.weight": np.zeros((130, 32), np.float32),
        "blk.0.attn_q.bias": np.zeros(32, np.float32),
        "blk.0.ffn_up.bias": np.zeros(48, np.float32),
    }
    spec = read(make_gguf, tensors, llama__vocab_size=...)
    assert (spec.vocab_size, spec.tie_word_embeddings, spec.torch_dtype) == (130, False, "float32")
    assert (spec.biases.qkv, spec.biases.mlp) == (True, True)


def test_every_kind_of_end_token_counts(make_gguf: MakeGGUF) -> None:
    spec = read(make_gguf, tokenizer__ggml__eot_token_id=9, tokenizer__ggml__eom_token_id=2)
    assert spec.eos_token_ids == (2, 9)


def test_linear_rope_scaling(make_gguf: MakeGGUF) -> None:
    spec = read(make_gguf, llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0)
    assert spec.rope_scaling == RopeScaling(kind="linear", factor=4.0)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_scaling_is_recognized_in_its_tensor(make_gguf: MakeGGUF, factor: float) -> None:
    wide: dict[str, Any] = {
        "llama__embedding_length": 512,
        "llama__rope__dimension_count": 128,
        "llama__rope__freq_base": 500000.0,
    }
    divisors = llama3_divisors(factor, 128, 500000.0)
    expected = RopeScaling(kind="llama3", factor=factor, original_max_position=8192)

    assert read(make_gguf, {"rope_freqs.weight": divisors}, **wide).rope_scaling == expected
    with pytest.raises(ConfigError, match="is not the rope scaling of Llama 3"):
        read(make_gguf, {"rope_freqs.weight": divisors[::-1].copy()}, **wide)


def test_divisors_of_one_are_no_scaling(make_gguf: MakeGGUF) -> None:
    assert read(make_gguf, {"rope_freqs.weight": np.ones(4, np.float32)}).rope_scaling == RopeScaling()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"arch": "clip"},
            "general.architecture is 'clip': the vision or audio tower .*; give the GGUF file of",
        ),
        (
            {"general__type": "mmproj"},
            r"\(mmproj\); give the GGUF file of the language model, .* and this file with --mmproj",
        ),
        (
            {"arch": "mamba"},
            "general.architecture is 'mamba', which is not supported; supported are: .*llama.*; give the model's",
        ),
        ({"llama__expert_count": 8}, "the field llama.expert_used_count is missing"),
        ({"llama__block_count": ...}, "the field llama.block_count is missing"),
        (
            {"llama__attention__head_count": 0},
            "llama.attention.head_count is 0, expected a whole number from 1",
        ),
        ({"llama__attention__head_count": [4, 4]}, "llama.attention.head_count is .*expected a whole number"),
        ({"llama__attention__head_count_kv": 3}, "4 attention heads cannot share 3 key/value heads"),
        ({"llama__rope__dimension_count": 4}, "rotary over a part of the head is not supported"),
        ({"llama__attention__value_length": 4}, "values must be as wide as keys"),
        ({"llama__rope__scaling__type": "ntk"}, "llama.rope.scaling.type is 'ntk', which is not supported"),
        ({"llama__rope__scaling__type": "yarn"}, "llama.rope.scaling.factor is missing"),
        ({"llama__attention__layer_norm_rms_epsilon": 2}, "layer_norm_rms_epsilon is 2, expected a number"),
        ({"tokenizer__ggml__eos_token_id": 128}, "eos_token_id is 128, expected token ids from 0 to 127"),
        ({"tensors": {"rope_freqs.weight": np.ones(3, np.float32)}}, "must hold 4 divisors"),
        ({"tensors": {"rope_freqs.weight": np.full(4, np.nan, np.float32)}}, "must hold 4 divisors"),
        (
            {"tensors": {"rope_factors_long.weight": np.ones(4, np.float32)}, **LONGROPE},
            "no tensor 'rope_factors_short",
        ),
        (
            {"tensors": {name: np.zeros(4, np.float32) for name in FACTORS}, **LONGROPE},
            "must hold 4 divisors above 0",
        ),
    ],
)
def test_a_refusal_names_file_key_and_rule(
    make_gguf: MakeGGUF, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(make_gguf, **changes)
    assert "tiny.gguf" in str(caught.value)


def test_experts_that_are_not_there_are_not_looked_for_one_by_one(make_gguf: MakeGGUF) -> None:
    """4096 layers of 65,536 experts each would be 800 million names."""
    metadata = {key.replace("llama.", "qwen3moe."): value for key, value in METADATA.items()}
    metadata |= {
        "qwen3moe.block_count": 4096,
        "qwen3moe.expert_count": 65536,
        "qwen3moe.expert_used_count": 8,
    }
    metadata |= {"qwen3moe.expert_feed_forward_length": 8}
    began_s = time.thread_time()
    spec = read_gguf_spec(GGUFFile(make_gguf(metadata, arch="qwen3moe")))
    assert spec.experts is not None
    assert spec.experts.num_experts == 65536
    assert time.thread_time() - began_s < 20  # it takes 0.1 s


def test_temperatures_of_decisions_are_facts_of_the_model(make_gguf: MakeGGUF) -> None:
    spec = read(make_gguf, decision__temperature__predicate=1.5, decision__temperature__choice__4=0.7)

    assert spec.decision_temperatures == {"predicate": 1.5, "choice.4": 0.7}
