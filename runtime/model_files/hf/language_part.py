"""The language model of a multimodal folder: which fields of config.json and which tensors of the files belong to it.

A folder with a vision or audio tower is served for text: `find_language_part` makes the configuration of a text model
of its config.json, and `MULTIMODAL` says how the tensors are named. `usual_names` (weight_files) takes the names from
here for all that reads or counts weights. A token of text attends to earlier tokens only and has the same position on
all axes of M-RoPE, in each of these models; one of which that is not true is not in the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from ...errors import ConfigError
from ..fields import Fields

_BODY: Final = ("language_model.model.", "model.language_model.", "language_model.")
"""What `model.` is called: by transformers before 4.52, since then, and in files without an output head."""
_HEAD: Final = "language_model.lm_head."
_VISION: Final = ("vision_tower.", "multi_modal_projector.")
_AUDIO: Final = ("audio_tower.", "multi_modal_projector.")
_TEXT: Final = "text_config"
_TOWERS: Final = ("vision_config", "audio_config")
_OUTER: Final = ("quantization_config", "compression_config", "quantization")
"""Fields that may stand beside `text_config` instead of inside of it."""
_CONNECTED: Final = ("vision_model.", "connector.")
_TEXT_MODEL: Final = ("model.text_model.", "text_model.")
_GEMMA_TOWERS: Final = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.")
_ROPES: Final = ("rope_scaling", "rope_parameters")
_AXES: Final = "mrope"


class Multimodal(NamedTuple):
    """A kind of multimodal folder, by the `model_type` of its config.json.

    Attributes:
        architecture: the class in transformers.
        text_type: `model_type` of the language model, unless the folder names another one.
        towers: prefixes of the tensors that are not read, also after `model.`: towers, and layers that only draft.
        body: prefixes of the language model's tensors, in the place of `model.`.
        is_fixed: transformers reads `text_config` as `text_type`, whatever it says.
        is_flat: older folders have the language model's fields beside `vision_config`, and no `text_config`.
        tied: the default of `tie_word_embeddings`.
        defaults: of `text_config`, with precedence over those of its `model_type`.
    """

    architecture: str
    text_type: str
    towers: tuple[str, ...]
    body: tuple[str, ...] = _BODY
    is_fixed: bool = False
    is_flat: bool = False
    tied: bool = False
    defaults: Mapping[str, object] = {}

    def usual_name(self, name: str) -> str | None:
        """The name of a tensor in a folder with the language model only; None: it belongs to a tower."""
        if name.removeprefix("model.").startswith(self.towers):
            return None
        if name.startswith(_HEAD):
            return "lm_head." + name.removeprefix(_HEAD)
        prefix = next((prefix for prefix in self.body if name.startswith(prefix)), "model.")
        return "model." + name.removeprefix(prefix) if name.startswith(prefix) else name

    @property
    def renamed(self) -> tuple[tuple[str, str], ...]:
        """Beginnings of the usual names, and what the folder may have instead."""
        return *(("model.", prefix) for prefix in self.body), ("lm_head", _HEAD.removesuffix("."))


class _TextType(NamedTuple):
    """A `model_type` of language models: the family that computes it, and transformers' defaults of its fields."""

    family: str
    defaults: Mapping[str, object]
    always: Mapping[str, object] = {}  # what its code does, whatever the file says


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


MULTIMODAL: Final[dict[str, Multimodal]] = {
    "gemma3": Multimodal("Gemma3ForConditionalGeneration", "gemma3_text", _VISION, is_fixed=True, tied=True),
    "mistral3": Multimodal("Mistral3ForConditionalGeneration", "mistral", _VISION, tied=True),
    "qwen2_vl": Multimodal(
        "Qwen2VLForConditionalGeneration", "qwen2_vl_text", ("visual.",), is_fixed=True, is_flat=True
    ),
    "qwen2_5_vl": Multimodal(
        "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", ("visual.",), is_fixed=True, is_flat=True
    ),
    "qwen3_vl": Multimodal("Qwen3VLForConditionalGeneration", "qwen3_vl_text", ("visual.",), is_fixed=True),
    "qwen3_vl_moe": Multimodal(
        "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text", ("visual.",), is_fixed=True
    ),
    "llava": Multimodal("LlavaForConditionalGeneration", "llama", _VISION),
    "llava_next": Multimodal("LlavaNextForConditionalGeneration", "llama", (*_VISION, "image_newline")),
    "llava_onevision": Multimodal(
        "LlavaOnevisionForConditionalGeneration", "qwen2", (*_VISION, "image_newline")
    ),
    "vipllava": Multimodal("VipLlavaForConditionalGeneration", "llama", _VISION),
    "internvl": Multimodal("InternVLForConditionalGeneration", "qwen2", _VISION, tied=True),
    # transformers does not scale the logits of these two; they were trained, and are scaled here, as Cohere 2.
    "cohere2_vision": Multimodal("Cohere2VisionForConditionalGeneration", "cohere2", _VISION, tied=True),
    "aya_vision": Multimodal("AyaVisionForConditionalGeneration", "cohere2", _VISION, tied=True),
    "idefics3": Multimodal("Idefics3ForConditionalGeneration", "llama", _CONNECTED, _TEXT_MODEL),
    "smolvlm": Multimodal("SmolVLMForConditionalGeneration", "llama", _CONNECTED, _TEXT_MODEL),
    "llama4": Multimodal(
        "Llama4ForConditionalGeneration",
        "llama4_text",
        ("vision_model.", "multi_modal_projector."),
        is_fixed=True,
    ),
    "gemma3n": Multimodal(
        "Gemma3nForConditionalGeneration", "gemma3n_text", _GEMMA_TOWERS, is_fixed=True, tied=True
    ),
    "gemma4": Multimodal(
        "Gemma4ForConditionalGeneration", "gemma4_text", _GEMMA_TOWERS, is_fixed=True, tied=True
    ),
    "qwen3_5": Multimodal(
        "Qwen3_5ForConditionalGeneration", "qwen3_5_text", ("visual.", "mtp."), is_fixed=True
    ),
    "qwen3_5_moe": Multimodal(
        "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text", ("visual.", "mtp."), is_fixed=True
    ),
    "lfm2_vl": Multimodal("Lfm2VlForConditionalGeneration", "lfm2", _VISION, tied=True),
    "qwen2_audio": Multimodal("Qwen2AudioForConditionalGeneration", "qwen2", _AUDIO),
    "voxtral": Multimodal(
        "VoxtralForConditionalGeneration",
        "llama",
        _AUDIO,
        defaults={
            "vocab_size": 131_072,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 30,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e8,
            "head_dim": 128,
        },
    ),
}
"""The folders of which the text is served."""

_QWEN: Final = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
}
_QWEN_VL: Final = {
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "max_window_layers": 80,
    "rope_theta": 1e6,
}
_TEXT_TYPES: Final[dict[str, _TextType]] = {
    "llama": _TextType(
        "llama",
        {
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 11_008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
        },
    ),
    "mistral": _TextType(
        "mistral",
        {
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
        },
    ),
    "qwen2": _TextType("qwen2", _QWEN | {"max_position_embeddings": 32_768}),
    "qwen3": _TextType("qwen3", _QWEN | {"max_position_embeddings": 32_768, "head_dim": 128}),
    "gemma3_text": _TextType(
        "gemma3_text",
        {
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
        },
    ),
    "qwen2_vl_text": _TextType("qwen2", _QWEN_VL),
    "qwen2_5_vl_text": _TextType("qwen2", _QWEN_VL),
    "qwen3_vl_text": _TextType(
        "qwen3", _QWEN | {"max_position_embeddings": 128_000, "head_dim": 128, "rope_theta": 5e5}
    ),
    "qwen3_vl_moe_text": _TextType(
        "qwen3_moe",
        {
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "max_position_embeddings": 128_000,
            "rms_norm_eps": 1e-6,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 4,
            "rope_theta": 5e5,
        },
        {"norm_topk_prob": True, "use_sliding_window": False},
    ),
}
"""Older files have only the fields of `text_config` that differ from these defaults."""


def find_language_part(path: Path, config: Mapping[str, object]) -> LanguagePart | None:
    """The language model in a configuration; None: the folder has nothing else.

    Args:
        path: of config.json, for messages.
        config: its contents.

    Raises:
        ConfigError: the folder has a tower, and its language model cannot be told from it.
    """
    fields = Fields(path, config)
    model_type, inner = config.get("model_type"), config.get(_TEXT)
    kind = MULTIMODAL.get(model_type) if isinstance(model_type, str) else None
    if kind is None:
        name = next((name for name in (_TEXT, *_TOWERS) if isinstance(config.get(name), Mapping)), None)
        if name is None:
            return None
        raise ConfigError(
            f"{path}: model_type is {model_type!r} with a {name}: a model of images or sound, and the engine serves "
            f"the text only of: {', '.join(MULTIMODAL)}; use one of them, or a GGUF file or folder of its language "
            "model"
        )
    assert isinstance(model_type, str)
    _check_architecture(fields, model_type, kind)
    if isinstance(inner, Mapping):
        prefix = f"{_TEXT}."
    elif inner is None and kind.is_flat:
        inner, prefix = {name: value for name, value in config.items() if name not in _TOWERS}, ""
        inner["model_type"] = kind.text_type
    else:
        raise fields.error(
            _TEXT, inner, "expected an object with the language model's fields; download it again"
        )
    return LanguagePart(model_type, _text_config(config, inner, kind), prefix)


def _check_architecture(fields: Fields, model_type: str, kind: Multimodal) -> None:
    value = fields.get("architectures")
    stem = kind.architecture.removesuffix("ForConditionalGeneration")
    if value and value not in ([kind.architecture], [f"{stem}Model"]):
        raise fields.error(
            "architectures", value, f"only ['{kind.architecture}'] is supported for {model_type}"
        )


def _text_config(
    config: Mapping[str, object], inner: Mapping[str, object], kind: Multimodal
) -> dict[str, object]:
    """The fields of the language model, with those beside `text_config` that concern it."""
    name = None if kind.is_fixed else inner.get("model_type")
    model_type = name or kind.text_type
    known = _TEXT_TYPES.get(str(model_type))
    text = {**({} if known is None else known.defaults), **kind.defaults, **inner}
    if known is not None:
        text |= known.always
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
