"""Architecture facts from the metadata and the tensor directory of a GGUF file.

GGUF's architecture `llama` is also used for variants of Llama (mixtures of experts, partial rotary); a feature that
changes the computation and is not implemented is refused by name.
"""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ..runtime.decision_calibration import calibration_of
from ..runtime.errors import ConfigError
from ..runtime.sampling_defaults import NAMES, SamplingDefaults, checked_defaults
from .families.family import GGUF
from .families.gguf_rope import read_gguf_rope_scaling
from .families.registry import GGUF_FAMILIES
from .fields import Fields
from .gguf.gguf_file import TOWER_ARCHITECTURE, GGUFFile
from .gguf_names import FUSED, stacked_names, stored_names
from .spec.layer_form import FUSED_QKV, PRE_NORMS, Biases
from .spec.model_spec import DTypeName, ModelSpec
from .spec.mtp_spec import MTPSpec
from .spec.quantization import GGUF_FORMS, QuantizationSpec

_EOS_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")  # end of text, of turn, of message
_NATIVE_DTYPES: Final[dict[str, DTypeName]] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_gguf_spec(file: GGUFFile) -> ModelSpec:
    """The architecture of the model in `file`.

    Raises:
        ConfigError: a key is missing or wrong, or the model needs something that is not implemented.
    """
    fields = Fields(file.path, file.metadata)
    arch = fields.text("general.architecture")
    if arch == TOWER_ARCHITECTURE or fields.get("general.type") == "mmproj":
        raise ConfigError(
            f"{file.path}: general.architecture is {arch!r}: the vision or audio tower of a model (mmproj); give the "
            "GGUF file of the language model, which is beside it, as the model, and this file with --mmproj"
        )
    if arch not in GGUF_FAMILIES:
        rule = (
            f"which is not supported; supported are: {', '.join(GGUF_FAMILIES)}; give the model's folder with "
            "config.json and safetensors instead, which transformers' code may run"
        )
        raise fields.error("general.architecture", arch, rule)
    model_type, family = GGUF_FAMILIES[arch].model_type, GGUF_FAMILIES[arch].gguf[arch]
    if not family.has_experts and fields.integer(f"{arch}.expert_count", 0, 1 << 16, default=0) > 0:
        raise fields.error(
            f"{arch}.expert_count", fields.get(f"{arch}.expert_count"), "experts are not supported"
        )
    vocab_size = _vocab_size(file, fields, arch)
    hidden_size = fields.integer(f"{arch}.embedding_length", 1, 1 << 20)
    rope_theta = fields.number(f"{arch}.rope.freq_base", 1.0, 1e15, default=10000.0)
    facts = {
        "model_type": model_type,
        "form": PRE_NORMS,
        "num_layers": fields.integer(f"{arch}.block_count", 1, 1 << 12),
        **family.facts(fields, arch),
    }
    if family.of_tensors is not None:
        facts = family.of_tensors(file, facts)
    num_heads = facts.pop("num_heads", None) or fields.integer(f"{arch}.attention.head_count", 1, 1 << 12)
    if not family.has_own_heads:
        head_dim = _head_dim(fields, arch, family, hidden_size // num_heads)
        rotary_dim = fields.integer(f"{arch}.rope.dimension_count", 1, head_dim, default=head_dim)
        heads = {
            "num_kv_heads": facts.get("num_kv_heads")  # some families have a number per layer
            or fields.integer(f"{arch}.attention.head_count_kv", 1, num_heads, default=num_heads),
            "head_dim": head_dim,
            "rotary_dim": None if rotary_dim == head_dim else rotary_dim,
            "rope_scaling": read_gguf_rope_scaling(file, fields, arch, rotary_dim, rope_theta),
        }
        facts = heads | facts
    eos_token_ids = [
        token_id for key in _EOS_KEYS for token_id in fields.token_ids(f"tokenizer.ggml.{key}", vocab_size)
    ]
    if "self_attn.qkv_proj" in family.names and "blk.0.attn_qkv.weight" in file.tensors:
        facts["form"] = structs.replace(facts["form"], qkv_names=FUSED_QKV)
    if facts["form"].head_bias and "output.bias" not in file.tensors:
        facts["form"] = structs.replace(facts["form"], head_bias=False)
    spec = ModelSpec(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=facts.pop("intermediate_size", None)
        or fields.integer(f"{arch}.feed_forward_length", 1, 1 << 22),
        num_heads=num_heads,
        rms_norm_eps=fields.number(f"{arch}.{family.norm_eps}", 1e-30, 1.0),
        rope_theta=rope_theta,
        max_position_embeddings=fields.integer(f"{arch}.context_length", 1, 1 << 30),
        tie_word_embeddings="output.weight" not in file.tensors,
        biases=Biases(
            qkv=bool({"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"} & set(file.tensors)),
            attention_out="blk.0.attn_output.bias" in file.tensors,
            mlp="blk.0.ffn_up.bias" in file.tensors,
        ),
        torch_dtype=_dtype(file),
        eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
        bos_token_id=fields.known_token_id("tokenizer.ggml.bos_token_id", vocab_size),
        sampling_defaults=read_gguf_sampling(file),
        decision_temperatures=calibration_of(file.metadata, "decision.temperature.", file.path),
        **facts,
    )
    mtp = _with_tensors(spec, file)
    spec, used = structs.replace(spec, mtp=mtp), mtp and structs.replace(mtp, is_used=True)
    types = _quantization(file, structs.replace(spec, mtp=used))
    spec = structs.replace(spec, max_position_embeddings=spec.known_positions, quantization=types)
    if contradiction := spec.contradiction():
        raise ConfigError(f"{file.path}: {contradiction}")
    return spec


def _with_tensors(spec: ModelSpec, file: GGUFFile) -> MTPSpec | None:
    """The layer that predicts further tokens, by the tensors that the file has of it."""
    if spec.mtp is None or f"blk.{spec.mtp.number}.nextn.eh_proj.weight" not in file.tensors:
        return None  # --no-nextn of llama.cpp's converter
    if f"blk.{spec.mtp.number}.nextn.shared_head_norm.weight" in file.tensors:
        return spec.mtp
    # As in llama.cpp, the model's own norm is before the head.
    return structs.replace(spec.mtp, head_norm=f"model.{spec.form.names.final_norm}")


def _quantization(file: GGUFFile, spec: ModelSpec) -> QuantizationSpec | None:
    """The modules stored in blocks that can stay quantized; None: there are none."""
    types: dict[str, str] = {}
    for name, stored, _ in stored_names(spec, experts=False):
        info = file.tensors.get(stored)
        if info is None or len(info.shape) != 2:
            continue
        if name.endswith(".weight") and info.ggml_type.name in GGUF_FORMS:
            module = name.removesuffix(".weight")
            types[module] = info.ggml_type.name
            for fused, parts in FUSED.items():
                if module.endswith(fused):  # memory is summed by the names of the parts
                    types |= {module.replace(fused, part): info.ggml_type.name for part in parts}
    for module, stored in stacked_names(spec):
        info = file.tensors.get(stored)
        if info is not None and len(info.shape) == 3 and info.ggml_type.name in GGUF_FORMS:
            types[module] = info.ggml_type.name
    return QuantizationSpec(method="gguf", types=types) if types else None


def _vocab_size(file: GGUFFile, fields: Fields, arch: str) -> int:
    """Rows of the embedding; files pad it beyond the number of tokens, and the metadata sometimes omits it."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None and len(embedding.shape) == 2:
        return embedding.shape[0]
    return fields.integer(f"{arch}.vocab_size", 1, 1 << 24)


def _head_dim(fields: Fields, arch: str, family: GGUF, default: int) -> int:
    head_dim = fields.integer(f"{arch}.attention.key_length", 1, 1 << 12, default=default)
    key = f"{arch}.attention.value_length"
    value = fields.integer(key, 1, 1 << 12, default=head_dim)
    if value != head_dim:
        raise fields.error(key, value, f"expected the head size {head_dim}: values must be as wide as keys")
    key = f"{arch}.rope.dimension_count"
    rotated = fields.integer(key, 1, 1 << 12, default=head_dim)
    if rotated != head_dim and (not family.partial_rotary or rotated > head_dim):
        rule = f"expected the head size {head_dim}: rotary over a part of the head is not supported"
        raise fields.error(key, rotated, rule)
    return head_dim


def _dtype(file: GGUFFile) -> DTypeName:
    """The dtype of the first layer's weights; bfloat16 for quantized ones, because their error is larger anyway."""
    for name in ("blk.0.attn_q.weight", "blk.0.attn_qkv.weight", "token_embd.weight"):
        if name in file.tensors:
            return _NATIVE_DTYPES.get(file.tensors[name].ggml_type.name, "bfloat16")
    return "bfloat16"


_PREFIX: Final = "general.sampling."
_OWN_KEYS: Final = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
_KEYS: Final = {_OWN_KEYS.get(name, name): name for name in NAMES}
_NOT_TAKEN: Final[dict[str, object]] = {
    "mirostat": 0,
    "penalty_freq": 0,
    "penalty_present": 0,
    "sequence": "",
    "xtc_probability": 0,
}
"""Keys that would change the text and are not used -> the value without an effect."""
_FLOAT32_DIGITS: Final = 7


def read_gguf_sampling(file: GGUFFile) -> SamplingDefaults:
    """The sampling defaults in the metadata of `file`.

    The repetition penalty counts over prompt and output; llama.cpp's window of `penalty_last_n` tokens is not
    supported, and a window of 0 turns the penalty off.
    """
    found = {
        key.removeprefix(_PREFIX): value for key, value in file.metadata.items() if key.startswith(_PREFIX)
    }
    values: dict[str, object] = {
        _KEYS[key]: float32_text(value) if isinstance(value, float) else value
        for key, value in found.items()
        if key in _KEYS
    }
    top_k, temperature = values.get("top_k"), values.get("temperature")
    if isinstance(top_k, int) and top_k <= 0:
        values["top_k"] = -1  # all
    if isinstance(temperature, float) and temperature < 0:
        values["temperature"] = 0.0  # greedy
    if found.get("penalty_last_n") == 0:
        values.pop("repetition_penalty", None)
    not_taken = tuple(
        f"{_PREFIX}{key}" for key, neutral in _NOT_TAKEN.items() if found.get(key, neutral) != neutral
    )
    return checked_defaults(values, file.path, f"{_PREFIX}* of the GGUF file", not_taken)


def float32_text(number: float) -> float:
    """A float32 without the digits that its conversion to float64 adds: 0.6 and not 0.6000000238."""
    return float(f"{number:.{_FLOAT32_DIGITS}g}")
