"""`read_embedder`: how the model in a folder makes vectors: pooling, layers after it, lengths, prompts.

A folder of sentence-transformers says all of this. For any other one it is what sentence-transformers does with it: the
last token of a decoder, the mean of an encoder.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from msgspec import structs

from ...runtime.config.model_choice import PoolingType, TaskChoice
from ...runtime.errors import ConfigError
from ..families.registry import ENCODERS
from ..fields import Fields
from ..spec.encoder_spec import MAX_DENSE_LAYERS, DenseSpec, HeadActivation, PoolingSpec
from .task import CAUSAL, MODULES, FoundTask, Module, Modules, architecture_of, part_fields

logger = logging.getLogger(__name__)

_MODES: Final[dict[str, PoolingType]] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_FLAGS: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Flags of sentence-transformers before 5.4, in its order, and the modes that replaced them."""
_ACTIVATIONS: Final[dict[str, HeadActivation]] = {
    "Identity": "identity",
    "Tanh": "tanh",
    "GELU": "gelu",
    "ReLU": "relu",
}
_VECTOR: Final = "sentence_embedding"
_MAX_SIZE: Final = 1 << 20


def read_embedder(
    folder: Path, fields: Fields, found: FoundTask, choice: TaskChoice, hidden_size: int
) -> PoolingSpec:
    """Options of the model for vectors.

    Args:
        folder: the model's.
        fields: of its config.json.
        found: the task embed, and the folder's modules.
        choice: what the user asks for.
        hidden_size: of the model.

    Raises:
        ConfigError: a file is missing or damaged, or asks for what the engine does not compute.
    """
    modules = found.modules
    if modules is None:
        default: PoolingType = "last" if _is_decoder(fields) else "mean"
        pooling = choice.pooling or default
        why = (
            f"without {MODULES} it is the default"
            if choice.pooling is None
            else f"--pooling {choice.pooling}"
        )
        spec = PoolingSpec(
            task="embed",
            pooling=pooling,
            size=hidden_size,
            normalize=_is_decoder(fields),
            reason=f"{found.reason}; {pooling} pooling: {why}",
        )
        logger.warning("%s: there is no %s: %s", folder, MODULES, spec.reason)
    else:
        spec = _from_modules(folder, modules, found, choice, hidden_size)
    return _with_dimensions(fields, modules, spec, choice)


def read_pooling_mode(
    folder: Path, part: Module, hidden_size: int, prompts: Mapping[str, str]
) -> PoolingType:
    """The pooling that a `Pooling` module asks for.

    Raises:
        ConfigError: it is not supported, or of another width than the model.
    """
    fields = part_fields(folder, part)
    width_name = fields.given("embedding_dimension", "word_embedding_dimension")
    width = fields.integer(width_name, 1, _MAX_SIZE, default=hidden_size)
    if width != hidden_size:
        raise fields.error(width_name, width, f"but the model's hidden size is {hidden_size}")
    name, modes = _modes(fields)
    if len(modes) != 1:
        raise fields.error(name, fields.get(name), "the vectors of several modes in a row are not supported")
    if modes[0] not in _MODES:
        raise fields.error(name, fields.get(name), f"only {', '.join(_MODES)} are supported")
    pooling = _MODES[modes[0]]
    if pooling != "last" and any(prompts.values()) and not fields.boolean("include_prompt", default=True):
        raise fields.error(
            "include_prompt", False, "vectors without the tokens of the prompt are not supported"
        )
    return pooling


def read_dense(folder: Path, part: Module, width: int, output: str = _VECTOR) -> DenseSpec:
    """A `Dense` module, which takes vectors of `width` numbers.

    Raises:
        ConfigError: it is not supported.
    """
    fields = part_fields(folder, part)
    if fields.boolean("use_residual", default=False):
        raise fields.error("use_residual", True, "only layers without a residual are supported")
    for name, expected in (("module_input_name", _VECTOR), ("module_output_name", output)):
        default = (
            _VECTOR if name == "module_input_name" else fields.text("module_input_name", default=_VECTOR)
        )
        if (value := fields.text(name, default=default)) != expected:
            raise fields.error(name, value, f"only {expected} is supported")
    dense = DenseSpec(
        folder=part.path,
        weight="linear.weight",
        bias="linear.bias" if fields.boolean("bias", default=True) else "",
        in_features=fields.integer("in_features", 1, _MAX_SIZE),
        out_features=fields.integer("out_features", 1, _MAX_SIZE),
        activation=_activation(fields),
    )
    if dense.in_features != width:
        raise fields.error("in_features", dense.in_features, f"but the layer before it gives {width} numbers")
    return dense


def read_prompts(modules: Modules) -> tuple[dict[str, str], str]:
    """Prompts by name, and the name of the default one, "" for none.

    Raises:
        ConfigError: a prompt is no text, or the default one does not exist.
    """
    settings = modules.settings
    prompts = settings.get("prompts")
    if prompts is None:
        prompts = {}
    if not isinstance(prompts, Mapping) or not all(isinstance(text, str) for text in prompts.values()):
        raise settings.error("prompts", prompts, "expected an object of texts")
    default = settings.text("default_prompt_name", default="")
    if default and default not in prompts:
        raise settings.error(
            "default_prompt_name", default, f"but the prompts are {', '.join(prompts) or 'none'}"
        )
    return dict(prompts), default


def _from_modules(
    folder: Path, modules: Modules, found: FoundTask, choice: TaskChoice, hidden_size: int
) -> PoolingSpec:
    prompts, default_prompt = read_prompts(modules)
    kinds = [part.kind for part in modules.parts]
    tail = kinds[2:]
    if kinds[1:2] != ["Pooling"] or "Normalize" in tail[:-1] or not set(tail) <= {"Dense", "Normalize"}:
        raise ConfigError(
            f"{folder / MODULES}: the modules are {', '.join(kinds)}; expected Transformer, Pooling, any number of "
            "Dense, and Normalize at the end or not at all"
        )
    own = read_pooling_mode(folder, modules.parts[1], hidden_size, prompts)
    pooling = choice.pooling or own
    reason = f"{found.reason}; {pooling} pooling: its files say so"
    if pooling != own:
        reason = f"{found.reason}; {pooling} pooling: --pooling, but its files say {own}"
        logger.warning("%s: %s", folder, reason)
    dense: list[DenseSpec] = []
    size = hidden_size
    for part in modules.parts[2:]:
        if part.kind == "Dense":
            dense.append(read_dense(folder, part, size))
            size = dense[-1].out_features
    if len(dense) > MAX_DENSE_LAYERS:
        raise ConfigError(
            f"{folder / MODULES}: it has {len(dense)} Dense, at most {MAX_DENSE_LAYERS} are supported"
        )
    return PoolingSpec(
        task="embed",
        pooling=pooling,
        size=size,
        dense=tuple(dense),
        normalize="Normalize" in tail,
        prompts=prompts,
        default_prompt=default_prompt,
        reason=reason,
    )


def _with_dimensions(
    fields: Fields, modules: Modules | None, spec: PoolingSpec, choice: TaskChoice
) -> PoolingSpec:
    """With the lengths to which vectors may be cut, as vLLM reads them, and as sentence-transformers cuts them."""
    listed = fields.integers("matryoshka_dimensions", 1, _MAX_SIZE)
    if wider := [length for length in listed if length > spec.size]:
        raise fields.error(
            "matryoshka_dimensions", list(listed), f"{wider[0]} is more than a vector has, {spec.size}"
        )
    any_dimensions = choice.any_dimensions
    if not listed:
        any_dimensions = any_dimensions or fields.boolean("is_matryoshka", default=False)
    default = 0
    if modules is not None and modules.settings.get("truncate_dim") is not None:
        default = modules.settings.integer("truncate_dim", 1, spec.size)
    lengths = set(listed) | ({default} if default else set())
    return structs.replace(
        spec,
        dimensions=tuple(sorted(lengths - {spec.size})),
        any_dimensions=any_dimensions,
        default_dimensions=default if default != spec.size else 0,
    )


def _is_decoder(fields: Fields) -> bool:
    """As sentence-transformers decides it: a decoder was trained to predict the next token."""
    architecture = architecture_of(fields)
    if not architecture:
        return fields.get("model_type") not in ENCODERS
    return architecture.endswith(CAUSAL) and fields.boolean("is_causal", default=True)


def _modes(fields: Fields) -> tuple[str, Sequence[str]]:
    """The modes, and the field that has them. The newer field has precedence."""
    value = fields.get("pooling_mode")
    if isinstance(value, str):
        return "pooling_mode", (value,)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return "pooling_mode", value
    if value is not None:
        raise fields.error("pooling_mode", value, "expected a name or a list of names")
    flags = [flag for flag in _FLAGS if fields.boolean(flag, default=False)]
    if not flags:
        return "pooling_mode", ("mean",)
    # The field to name is one that is not supported, if there is one.
    named = next((flag for flag in flags if _FLAGS[flag] not in _MODES), flags[-1])
    return named, [_FLAGS[flag] for flag in flags]


def _activation(fields: Fields) -> HeadActivation:
    path = fields.text("activation_function", default="torch.nn.modules.activation.Tanh")
    kind = path.rpartition(".")[2]
    if not path.startswith("torch.nn.") or kind not in _ACTIVATIONS:
        raise fields.error(
            "activation_function", path, f"only {', '.join(_ACTIVATIONS)} of torch.nn are supported"
        )
    return _ACTIVATIONS[kind]
