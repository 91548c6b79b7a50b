"""Architecture facts from a folder in Hugging Face layout: config.json and generation_config.json.

A feature that changes the computation and is not implemented is refused by name, never ignored: a model that loads and
then produces wrong output is the worst failure. This module reads the common fields, `families` those of one
architecture, and `hf_other` those of architectures that the engine has no model for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, cast

from msgspec import structs

from ...runtime.config.model_choice import NO_CHOICE, TaskChoice
from ...runtime.errors import ConfigError
from ..families.family import Facts, Family
from ..families.hf_readers import head_dim_of
from ..families.hf_rope import MAX_POSITIONS
from ..families.registry import ENCODERS, FAMILIES
from ..fields import Fields
from ..model_files import read_json
from ..spec.encoder_spec import PoolingSpec
from ..spec.model_spec import DTypeName, ModelSpec
from ..spec.quantization import MIXER_NAMES, QuantizationSpec
from .hf_other import other_family, with_common_names
from .hf_quantization import read_quantization
from .hf_sampling import read_hf_sampling
from .language_part import LanguagePart, find_language_part
from .multimodal_types import MULTIMODAL
from .sentence_transformers import read_pooling, token_limit
from .special_tokens import read_eos_ids
from .task import FoundTask, architectures_of, check_architectures, find_task
from .vision_part import read_vision

_DTYPES: Final = ("float32", "bfloat16", "float16")


def read_hf_spec(folder: Path, choice: TaskChoice = NO_CHOICE, name: str = "") -> ModelSpec:
    """The architecture of the model in `folder`.

    Args:
        folder: the model's.
        choice: the task that the user asks for.
        name: of the model, which says whether a decoder is a reranker.

    Raises:
        ConfigError: a file or field is missing or wrong, or the model needs a feature that is not implemented.
    """
    path = folder / "config.json"
    config = read_json(path)
    fields = Fields(path, config)
    found = find_task(folder, fields, choice, name)
    part = find_language_part(path, config)
    spec = _read_spec(folder, config, found) if part is None else _read_part(folder, part, found)
    pooling = read_pooling(folder, fields, found, choice, spec.hidden_size, name)
    if pooling is not None:
        return _with_pooling(folder, spec, pooling)
    if part is None or choice.language_only:
        return spec
    return structs.replace(spec, vision=read_vision(folder, config, spec))


def read_layers(folder: Path, config: Mapping[str, object], prefix: str = "") -> ModelSpec:
    """The architecture that generates text of another configuration than the folder's own, as of a draft head.

    Args:
        folder: with the other files.
        config: in the form of config.json.
        prefix: of its fields in messages.

    Raises:
        ConfigError: as in `read_hf_spec`.
    """
    return _read_spec(folder, config, FoundTask("generate", "a part of another model"), prefix)


def _with_pooling(folder: Path, spec: ModelSpec, pooling: PoolingSpec) -> ModelSpec:
    """The architecture of an embedder or a scorer, which has no output head unless scores are of its tokens."""
    return structs.replace(
        spec,
        pooling=pooling,
        max_position_embeddings=min(spec.max_position_embeddings, token_limit(folder) or MAX_POSITIONS),
        tie_word_embeddings=spec.tie_word_embeddings or not pooling.label_tokens,
    )


def _read_part(folder: Path, part: LanguagePart, found: FoundTask) -> ModelSpec:
    """The architecture of the language model in a multimodal folder, without pooling."""
    spec = _read_spec(folder, part.config, found, part.prefix)
    quantization = spec.quantization
    if quantization is not None:
        quantization = structs.replace(quantization, renamed=MULTIMODAL[part.outer].renamed)
    files = structs.replace(spec.files, language_of=part.outer)
    return structs.replace(spec, files=files, quantization=quantization)


def _read_spec(folder: Path, config: Mapping[str, object], found: FoundTask, prefix: str = "") -> ModelSpec:
    """The architecture without pooling.

    `prefix`: of the fields in messages, where the configuration is an object inside of config.json.
    """
    path = folder / "config.json"
    fields = Fields(path, config, prefix)
    model_type = fields.text("model_type")
    known = FAMILIES.get(model_type)
    if known is not None:
        family = known
        if family.is_encoder:
            fields = encoder_fields(fields, config, family)
        else:
            _check_family(fields, family, found)
            fields = Fields(path, family.with_common_names(config), prefix)
    elif model_type in UNSUPPORTED_ENCODERS:
        supported = ", ".join(ENCODERS)
        raise fields.error(
            "model_type", model_type, f"and {UNSUPPORTED_ENCODERS[model_type]}; encoders can be: {supported}"
        )
    else:
        fields = Fields(path, with_common_names(config, fields), prefix)
        family = other_family(fields)
    vocab_size = fields.integer("vocab_size", 1, 1 << 24)
    hidden_size = fields.integer("hidden_size", 1, 1 << 20)
    num_heads = fields.integer("num_attention_heads", 1, 1 << 12)
    facts: Facts = {
        # Models older than grouped-query attention do not have these two fields.
        "num_kv_heads": fields.integer("num_key_value_heads", 1, num_heads, default=num_heads),
        "head_dim": head_dim_of(fields, family.head_dim),
        "max_position_embeddings": fields.integer("max_position_embeddings", 1, MAX_POSITIONS),
        **family.read(fields),
    }
    spec = ModelSpec(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=facts.pop("intermediate_size", None)
        or fields.integer("intermediate_size", 1, 1 << 22),
        num_layers=facts.pop("num_layers", None) or fields.integer("num_hidden_layers", 1, 1 << 12),
        num_heads=num_heads,
        rms_norm_eps=fields.number(family.norm_eps, 1e-30, 1.0),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=family.tied),
        torch_dtype=_dtype(fields),
        eos_token_ids=() if "encoder" in facts else _eos_token_ids(fields, folder, vocab_size),
        bos_token_id=fields.known_token_id("bos_token_id", vocab_size),
        quantization=_by_usual_names(read_quantization(folder, fields), family),
        sampling_defaults=read_hf_sampling(folder),
        **facts,
    )
    spec = structs.replace(spec, max_position_embeddings=spec.known_positions)
    if spec.quantization is not None and spec.form.mlp_layers:
        spec = structs.replace(spec, quantization=structs.replace(spec.quantization, renamed=MIXER_NAMES))
    if contradiction := spec.contradiction():
        raise ConfigError(f"{path}: {contradiction}")
    return spec


def _by_usual_names(found: QuantizationSpec | None, family: Family) -> QuantizationSpec | None:
    """Lists of modules with the engine's names in the place of those of the family's files; patterns stay as they are.

    Patterns are matched with the files' names, see `QuantizationSpec.stored_names`.
    """
    if found is None or not family.tensors:
        return found

    def usual(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(
            name if name.startswith("re:") else family.tensor_name(f"{name}.").removesuffix(".")
            for name in names
        )

    parts = tuple((usual(names), form) for names, form in found.parts)
    return structs.replace(
        found, plain_modules=usual(found.plain_modules), parts=parts, stored_names=family.stored_names
    )


def _check_family(fields: Fields, family: Family, found: FoundTask) -> None:
    check_architectures(fields, family.classes(found.task), family.model_type)
    # Gemma has it under two names; the newer one has precedence.
    name = "hidden_activation" if fields.get("hidden_activation") is not None else "hidden_act"
    activation = fields.text(name, default=family.activation)
    if activation not in (family.activation, family.old_activation):
        raise fields.error(
            name, activation, f"only {family.activation!r} is supported for {family.model_type}"
        )


def _dtype(fields: Fields) -> DTypeName:
    """The dtype of the saved weights: `dtype` in transformers 5; both fields default to float32."""
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = fields.text(name, default="float32").removeprefix("torch.")
    if value not in _DTYPES:
        raise fields.error(name, value, f"which is not supported; supported are: {', '.join(_DTYPES)}")
    return cast(DTypeName, value)


def _eos_token_ids(fields: Fields, folder: Path, vocab_size: int) -> tuple[int, ...]:
    """End-of-text tokens of all files: the end-of-turn token is often in only one of them."""
    ids = fields.token_ids("eos_token_id", vocab_size)
    generation = folder / "generation_config.json"
    if generation.exists():
        ids += Fields(generation, read_json(generation)).token_ids("eos_token_id", vocab_size)
    return tuple(dict.fromkeys(ids + read_eos_ids(folder, vocab_size)))


_TASKS: Final = ("Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification")
"""Endings of the names of architectures: what is on top of the encoder is ignored, or read as a pooling head."""
_REFUSED: Final[dict[str, str]] = {
    "is_decoder": "an encoder is needed",
    "add_cross_attention": "attention to another text is not supported",
}
UNSUPPORTED_ENCODERS: Final[dict[str, str]] = {
    "albert": "embeddings of another size and shared layers are not supported",
    "deberta": "relative positions are not supported",
    "deberta-v2": "relative positions are not supported",
    "electra": "this encoder is not supported",
    "mpnet": "relative position biases are not supported",
    "nomic_bert": "this encoder is not supported",
    "t5": "relative position biases are not supported",
}
"""`model_type` values of encoders that people use for embeddings, and why they are refused."""


def encoder_fields(fields: Fields, config: Mapping[str, object], family: Family) -> Fields:
    """The fields of an encoder under the usual names.

    Raises:
        ConfigError: the model is not a plain encoder, or needs something that is not implemented.
    """
    _check(fields, family)
    given = {name: value for name, value in config.items() if value is not None}
    common = family.with_common_names(given)
    # An encoder has no output head; the heads of its training are ignored.
    return Fields(fields.path, {**common, "tie_word_embeddings": True, "eos_token_id": None})


def _check(fields: Fields, family: Family) -> None:
    known = {family.architecture + task for task in _TASKS}
    if not known.issuperset(architectures_of(fields)):
        raise fields.error(
            "architectures",
            fields.get("architectures"),
            f"expected one of {', '.join(family.architecture + task for task in _TASKS)}",
        )
    for name, rule in _REFUSED.items():
        if fields.get(name):
            raise fields.error(name, fields.get(name), rule)
    kind = fields.text("position_embedding_type", default="absolute")
    if kind != "absolute":
        raise fields.error("position_embedding_type", kind, "only 'absolute' is supported")
    if fields.get("quantization_config"):
        raise fields.error(
            "quantization_config",
            fields.get("quantization_config"),
            "encoders need weights that are not quantized",
        )
