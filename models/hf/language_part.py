"""The language model of a multimodal folder: which fields of config.json belong to it.

A folder with a vision or audio tower is served for text: `find_language_part` makes the configuration of a text model
of its config.json, by the table in `multimodal_types`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from ...runtime.errors import ConfigError
from ..families.registry import FAMILIES
from ..fields import Fields
from .hf_other import refuse_unsupported
from .multimodal_types import MULTIMODAL, TEXT_TYPES, Multimodal
from .task import check_architectures

_TEXT: Final = "text_config"
_TOWERS: Final = ("vision_config", "audio_config")
_OUTER: Final = ("quantization_config", "compression_config", "quantization")
"""Fields that may stand beside `text_config` instead of inside of it."""
_COMMON: Final = ("dtype", "torch_dtype", "eos_token_id", "bos_token_id")
"""The same where the model is a part of a larger one."""
_ROPES: Final = ("rope_scaling", "rope_parameters")
_AXES: Final = "mrope"


class LanguagePart(NamedTuple):
    """The language model of a multimodal folder.

    Attributes:
        outer: `model_type` of the folder, a key of `MULTIMODAL`.
        config: the configuration of the language model, as a folder of its own would have it.
        prefix: of its fields in messages.
    """

    outer: str
    config: Mapping[str, object]
    prefix: str


def find_language_part(path: Path, config: Mapping[str, object]) -> LanguagePart | None:
    """The language model in a configuration; None: the folder has nothing else.

    Args:
        path: of config.json, for messages.
        config: its contents.

    Raises:
        ConfigError: the folder has a tower, and its language model cannot be found in it.
    """
    fields = Fields(path, config)
    model_type = config.get("model_type")
    kind = MULTIMODAL.get(model_type) if isinstance(model_type, str) else None
    if kind is None:
        name = next((name for name in (_TEXT, *_TOWERS) if isinstance(config.get(name), Mapping)), None)
        if name is None:
            return None
        inner = config.get(_TEXT)
        if isinstance(inner, Mapping) and inner.get("model_type") not in FAMILIES:
            refuse_unsupported(Fields(path, inner, f"{_TEXT}."))  # the deeper reason
        raise ConfigError(
            f"{path}: model_type is {model_type!r} with a {name}: a model of images or sound, and the engine serves "
            f"the text only of: {', '.join(MULTIMODAL)}; use one of them, or a GGUF file or folder of its language "
            "model"
        )
    assert isinstance(model_type, str)
    _check_architecture(fields, model_type, kind)
    place, inner = kind.place, config.get(kind.place)
    if kind.part:
        config, inner = _part_config(fields, config, kind)
        place = f"{kind.part}_config.{_TEXT}"
    if isinstance(inner, Mapping):
        prefix = f"{place}."
    elif kind.place not in config and kind.is_flat:
        inner, prefix = {name: value for name, value in config.items() if name not in _TOWERS}, ""
        inner["model_type"] = kind.text_type
    else:
        raise fields.error(
            place,
            inner,
            "expected an object with the language model's fields; download it again",
        )
    return LanguagePart(model_type, _text_config(config, inner, kind), prefix)


def _part_config(
    fields: Fields, config: Mapping[str, object], kind: Multimodal
) -> tuple[Mapping[str, object], object]:
    """The configuration of the part with the language model, and its `text_config`."""
    name = f"{kind.part}_config"
    part = config.get(name)
    if not isinstance(part, Mapping):
        raise fields.error(
            name, part, "expected an object with the language model's fields; download it again"
        )
    common = {field: config[field] for field in (*_OUTER, *_COMMON) if config.get(field) is not None}
    return {**common, **part}, part.get(_TEXT)


def _check_architecture(fields: Fields, model_type: str, kind: Multimodal) -> None:
    stem = kind.architecture.removesuffix("ForConditionalGeneration")
    supported = (kind.architecture, f"{stem}Model", kind.also)
    check_architectures(fields, supported, model_type)


def _text_config(
    config: Mapping[str, object], inner: Mapping[str, object], kind: Multimodal
) -> dict[str, object]:
    """The fields of the language model, with those beside `text_config` that concern it."""
    name = None if kind.is_fixed else inner.get("model_type")
    model_type = name or kind.text_type
    known = TEXT_TYPES.get(str(model_type))
    text = {**({} if known is None else known.defaults), **kind.defaults, **inner}
    if known is not None:
        text |= known.always
        if known.divides_hidden:
            _divide_hidden(text)
    text["model_type"] = model_type if known is None else known.family
    text["eos_token_id"] = _both(config.get("eos_token_id"), inner.get("eos_token_id"))
    if text.get("bos_token_id") is None:
        text["bos_token_id"] = config.get("bos_token_id")
    for field in _OUTER:
        if config.get(field) is not None:
            text[field] = config[field]
    _set_dtype(text, config)
    # A head of its own in the files has precedence, see `check_weights`.
    ties = [
        each["tie_word_embeddings"] for each in (config, inner) if each.get("tie_word_embeddings") is not None
    ]
    if True in ties or not ties:
        text["tie_word_embeddings"] = True if ties else kind.tied
    else:
        text["tie_word_embeddings"] = ties[0]
    for field in _ROPES:
        text[field] = _with_one_axis(text.get(field))
    text.pop("architectures", None)
    return text


def _divide_hidden(text: dict[str, object]) -> None:
    """Set the head size to the hidden size divided by the heads; wrong sizes are found by their reader."""
    size, num_heads = text.get("hidden_size"), text.get("num_attention_heads")
    if isinstance(size, int) and isinstance(num_heads, int) and num_heads:
        text["head_dim"] = size // num_heads


def _both(outer: object, inner: object) -> object:
    """The token ids of two fields, each of which is null, a number or a list."""
    ids: list[object] = []
    for value in (outer, inner):
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return ids or None


def _set_dtype(text: dict[str, object], config: Mapping[str, object]) -> None:
    """The outer dtype has precedence: transformers makes the whole model in it."""
    value = next((config[name] for name in ("dtype", "torch_dtype") if config.get(name) is not None), None)
    if value is not None:
        text["dtype"] = value


def _with_one_axis(rope: object) -> object:
    """A rope of several axes for text, in which a token has one position: the rope without the division into axes."""
    if not isinstance(rope, Mapping):
        return rope
    return {
        name: "default" if name in ("type", "rope_type") and value == _AXES else value
        for name, value in rope.items()
        if not name.startswith(f"{_AXES}_")
    }
