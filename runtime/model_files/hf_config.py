"""Architecture facts from a folder in Hugging Face layout: config.json and generation_config.json.

Whatever would change the computation and is not implemented is refused by name, never ignored: a model that
loads and then talks nonsense is the worst failure. Both spellings of rotary parameters are read, `rope_theta`
with `rope_scaling` (transformers 4) and `rope_parameters` (transformers 5).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, cast

from ..errors import ConfigError
from .fields import Fields
from .json_file import read_json
from .model_spec import SUPPORTED_MODEL_TYPES, DTypeName, ModelSpec, RopeScaling

_ARCHITECTURES: Final = {"llama": "LlamaForCausalLM"}
_DTYPES: Final = ("float32", "bfloat16", "float16")
_MAX_POSITIONS: Final = 1 << 30
_ROPE_TYPES: Final = ("default", "linear", "llama3")


def read_hf_spec(folder: Path) -> ModelSpec:
    """The architecture of the model in `folder`.

    Raises:
        ConfigError: a file or field is missing or wrong, or the model needs something that is not
            implemented.
    """
    path = folder / "config.json"
    config = read_json(path)
    fields = Fields(path, config)
    model_type = _supported_model_type(fields)
    vocab_size = fields.integer("vocab_size", 1, 1 << 24)
    hidden_size = fields.integer("hidden_size", 1, 1 << 20)
    num_heads = fields.integer("num_attention_heads", 1, 1 << 12)
    rope_theta, rope_scaling = _rope(fields)
    bos_token_ids = fields.token_ids("bos_token_id", vocab_size)
    spec = ModelSpec(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 1, 1 << 22),
        num_layers=fields.integer("num_hidden_layers", 1, 1 << 12),
        num_heads=num_heads,
        # Models older than grouped-query attention do not have these two fields.
        num_kv_heads=fields.integer("num_key_value_heads", 1, num_heads, default=num_heads),
        head_dim=fields.integer("head_dim", 1, 1 << 12, default=hidden_size // num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-30, 1.0),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_position_embeddings=fields.integer("max_position_embeddings", 1, _MAX_POSITIONS),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
        attention_bias=fields.boolean("attention_bias", default=False),
        mlp_bias=fields.boolean("mlp_bias", default=False),
        torch_dtype=_dtype(fields),
        eos_token_ids=_eos_token_ids(fields, folder, vocab_size),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
    )
    if contradiction := spec.contradiction():
        raise ConfigError(f"{path}: {contradiction}")
    return spec


def _supported_model_type(fields: Fields) -> str:
    model_type = fields.text("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        supported = ", ".join(SUPPORTED_MODEL_TYPES)
        raise fields.error("model_type", model_type, f"which is not supported; supported are: {supported}")
    expected = _ARCHITECTURES[model_type]
    architectures = fields.get("architectures")
    if architectures is not None and architectures != [expected]:
        raise fields.error(
            "architectures", architectures, f"only ['{expected}'] is supported for {model_type}"
        )
    if fields.get("quantization_config") is not None:
        raise fields.error(
            "quantization_config",
            fields.get("quantization_config"),
            "quantised checkpoints are not supported; use the original weights or a GGUF file",
        )
    activation = fields.text("hidden_act", default="silu")
    if activation != "silu":
        raise fields.error("hidden_act", activation, "only 'silu' is supported")
    return model_type


def _rope(fields: Fields) -> tuple[float, RopeScaling]:
    """Base frequency and scaling, from either spelling."""
    name = "rope_parameters" if fields.get("rope_parameters") is not None else "rope_scaling"
    values = fields.get(name)
    if values is None:
        values = {}
    if not isinstance(values, Mapping):
        raise fields.error(name, values, "expected an object or null")
    rope = Fields(fields.path, values, prefix=f"{name}.")
    # Llama 1 and 2 were published without the field; 10000 is what they were trained with.
    top_level_theta = fields.number("rope_theta", 1.0, 1e15, default=10000.0)
    theta = rope.number("rope_theta", 1.0, 1e15, default=top_level_theta)
    for holder in (fields, rope):
        partial = holder.number("partial_rotary_factor", 0.0, 1.0, default=1.0)
        if partial != 1.0:
            raise holder.error("partial_rotary_factor", partial, "only 1.0 is supported")
    kind_field = "rope_type" if rope.get("rope_type") is not None else "type"
    kind = rope.text(kind_field, default="default")
    if kind not in _ROPE_TYPES:
        raise rope.error(kind_field, kind, f"which is not supported; supported are: {', '.join(_ROPE_TYPES)}")
    if kind == "default":
        unknown = set(values) - {"rope_theta", kind_field, "partial_rotary_factor"}
        if any(isinstance(values[key], Mapping) for key in unknown):
            raise fields.error(name, values, "a different rope for some of the layers is not supported")
        return theta, RopeScaling()
    factor = rope.number("factor", 1.0, 1e6)
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=factor)
    return theta, RopeScaling(
        kind="llama3",
        factor=factor,
        low_freq_factor=rope.number("low_freq_factor", 1e-6, 1e6),
        high_freq_factor=rope.number("high_freq_factor", 1e-6, 1e6),
        original_max_position=rope.integer("original_max_position_embeddings", 1, _MAX_POSITIONS),
    )


def _dtype(fields: Fields) -> DTypeName:
    """The type the weights were saved in: `dtype` in transformers 5; both default to float32."""
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = fields.text(name, default="float32").removeprefix("torch.")
    if value not in _DTYPES:
        raise fields.error(name, value, f"which is not supported; supported are: {', '.join(_DTYPES)}")
    return cast(DTypeName, value)


def _eos_token_ids(fields: Fields, folder: Path, vocab_size: int) -> tuple[int, ...]:
    """End-of-text tokens of all files that name some: the end of a turn often stands in one of the others only."""
    ids = fields.token_ids("eos_token_id", vocab_size)
    generation = folder / "generation_config.json"
    if generation.exists():
        ids += Fields(generation, read_json(generation)).token_ids("eos_token_id", vocab_size)
    tokenizer = folder / "tokenizer_config.json"
    if tokenizer.exists():
        ids += _tokenizer_eos(read_json(tokenizer), vocab_size)
    return tuple(dict.fromkeys(ids))


def _tokenizer_eos(config: Mapping[str, object], vocab_size: int) -> tuple[int, ...]:
    """The id of the tokenizer's `eos_token`, where its added tokens are listed in the same file."""
    eos, added = config.get("eos_token"), config.get("added_tokens_decoder")
    text = eos.get("content") if isinstance(eos, Mapping) else eos
    if not isinstance(text, str) or not isinstance(added, Mapping):
        return ()
    ids = (key for key, token in added.items() if isinstance(token, Mapping) and token.get("content") == text)
    return tuple(int(key) for key in ids if key.isdecimal() and int(key) < vocab_size)
