"""Encoders: their facts from config.json, the names of their tensors, and refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.models.hf.hf_config import read_hf_spec
from engine.models.spec.model_spec import ModelSpec
from engine.models.weight_files.check_weights import check_folder_weights
from engine.models.weight_files.encoder_tensors import encoder_modules
from engine.models.weight_files.weight_memory import num_parameters
from engine.runtime.errors import ConfigError

BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
}
ROBERTA: dict[str, Any] = {"model_type": "roberta", "architectures": ["RobertaModel"], "pad_token_id": 1}
MODERNBERT: dict[str, Any] = {
    "model_type": "modernbert",
    "architectures": ["ModernBertModel"],
    "norm_eps": 1e-5,
    "num_hidden_layers": 5,
    "local_attention": 10,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
}


def read(folder: Path, **changes: Any) -> ModelSpec:
    """Without how the folder says that vectors are made."""
    config = {name: value for name, value in {**BERT, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return msgspec.structs.replace(read_hf_spec(folder), pooling=None)


def write_tensors(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file with zeros."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def test_bert(tmp_path):
    spec = read(tmp_path)
    encoder = spec.encoder
    assert encoder is not None and not spec.causal and spec.num_kv_layers == 1
    assert encoder.post_norm and encoder.activation == "gelu" and not encoder.gated_mlp and encoder.norm_bias
    assert (encoder.position_rows, encoder.position_offset, encoder.token_types) == (40, 0, 2)
    assert spec.max_position_embeddings == 40 and spec.rms_norm_eps == 1e-12 and spec.head_dim == 8
    assert spec.biases.qkv and spec.biases.attention_out and spec.biases.mlp
    assert spec.eos_token_ids == ()


def test_fields_that_a_file_omits_have_the_defaults_of_transformers(tmp_path):
    spec = read(
        tmp_path,
        layer_norm_eps=...,
        type_vocab_size=...,
        hidden_act=...,
        position_embedding_type=...,
        architectures=...,
    )
    assert spec == read(tmp_path)


@pytest.mark.parametrize(("padding", "offset"), [(1, 2), (5, 6), (..., 2)])
def test_the_positions_of_roberta_begin_after_the_padding_token(tmp_path, padding, offset):
    spec = read(tmp_path, **{**ROBERTA, "pad_token_id": padding})
    assert spec.encoder is not None and spec.encoder.position_offset == offset
    assert spec.max_position_embeddings == spec.encoder.positions == 40 - offset


def test_distilbert_has_names_of_its_own(tmp_path):
    names = {"hidden_size": "dim", "intermediate_size": "hidden_dim", "num_hidden_layers": "n_layers"}
    changes: dict[str, Any] = {theirs: BERT[name] for name, theirs in names.items()} | dict.fromkeys(
        names, ...
    )
    changes |= {"n_heads": 4, "num_attention_heads": ..., "activation": "relu", "type_vocab_size": ...}
    spec = read(tmp_path, model_type="distilbert", architectures=["DistilBertForMaskedLM"], **changes)
    assert spec.encoder is not None and spec.encoder.activation == "relu" and spec.encoder.token_types == 0
    assert (spec.hidden_size, spec.intermediate_size, spec.num_layers, spec.num_heads) == (32, 48, 2, 4)


def test_modernbert(tmp_path):
    spec = read(tmp_path, **MODERNBERT)
    encoder = spec.encoder
    assert encoder is not None and not encoder.post_norm and encoder.gated_mlp and not encoder.norm_bias
    assert encoder.position_rows == encoder.token_types == 0
    assert spec.windows is not None and spec.windows.layers == (False, True, True, False, True)
    assert spec.window_of(1) == 11, "5 tokens on each side and the token itself"
    assert spec.rope_theta == 160000.0 and spec.windows.rope_theta == 10000.0
    assert not (spec.biases.qkv or spec.biases.attention_out or spec.biases.mlp)


def test_modernbert_in_the_spelling_of_transformers_5(tmp_path):
    ropes = {
        "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    }
    kinds = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    old = dict.fromkeys(("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta"), ...)
    spec = read(tmp_path, **{**MODERNBERT, **old, "rope_parameters": ropes, "layer_types": kinds})
    assert spec.windows is not None and spec.windows.layers == (True, False, True, False, True)
    assert (spec.rope_theta, spec.windows.rope_theta) == (5000.0, 300.0)
    without = read(tmp_path, **{**MODERNBERT, **old})
    assert without.windows is not None
    assert (without.rope_theta, without.windows.rope_theta) == (160000.0, 10000.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"position_embedding_type": "relative_key"},
            "position_embedding_type is 'relative_key', only 'absolute'",
        ),
        ({"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'"),
        ({"is_decoder": True}, "is_decoder is True, an encoder is needed"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"hidden_act": "swish2"}, "hidden_act is 'swish2', which is not supported; supported are: gelu"),
        ({"architectures": ["BertForQuestionAnswering"]}, "expected one of BertModel, BertForMaskedLM"),
        ({"architectures": ["JinaBertForMaskedLM"]}, "expected one of BertModel"),
        ({"quantization_config": {"quant_method": "awq"}}, "encoders need weights that are not quantized"),
        ({"num_attention_heads": 5}, "5 attention heads cannot divide the hidden size 32 evenly"),
        ({"model_type": "mpnet"}, "model_type is 'mpnet', and relative position biases are not supported"),
        ({"model_type": "deberta-v2"}, "encoders can be: bert, distilbert, modernbert, roberta, xlm-roberta"),
        ({**ROBERTA, "max_position_embeddings": 2}, "expected more than 2, the row of the first token"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, **changes)


VARIANTS: dict[str, dict[str, Any]] = {"bert": {}, "roberta": ROBERTA, "modernbert": MODERNBERT}
PREFIXES = {"bert": "bert.", "roberta": "roberta.", "modernbert": "model."}


@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_tensors_are_found_with_and_without_a_head(tmp_path, name, has_head):
    spec = read(tmp_path, **VARIANTS[name])
    prefix = PREFIXES[name] if has_head else ""
    shapes: dict[str, tuple[int, ...]] = {}
    for module in encoder_modules(spec, prefix):
        shapes[f"{module.name}.weight"] = module.shape
        if module.has_bias:
            shapes[f"{module.name}.bias"] = module.shape[:1]
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == num_parameters(spec)
    beside: dict[str, tuple[int, ...]] = {
        f"{prefix}embeddings.position_ids": (1, 40),
        f"{prefix}pooler.dense.weight": (32, 32),
    }
    if has_head:
        beside |= {"cls.predictions.bias": (64,), "lm_head.bias": (64,), "classifier.weight": (2, 32)}
    write_tensors(tmp_path, shapes | beside)
    assert check_folder_weights(tmp_path, spec)[0] == spec

    write_tensors(tmp_path, {**shapes, f"{prefix}encoder.relative.weight": (2, 2)})
    with pytest.raises(ConfigError, match="unexpected tensor"):
        check_folder_weights(tmp_path, spec)
    missing = next(tensor for tensor in shapes if "layer" in tensor)
    write_tensors(tmp_path, {tensor: shape for tensor, shape in shapes.items() if tensor != missing})
    with pytest.raises(ConfigError, match=f"tensor '{missing}' is missing"):
        check_folder_weights(tmp_path, spec)
