"""The tower of a multimodal folder: `vision_config` of config.json, and its processor's configuration.

Kinds of folders that are not in `_DEFAULTS` are served for their text only.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ..fields import Fields
from ..model_files import read_json
from ..spec.vision_spec import ImageProcessing, VisionActivation, VisionSpec
from .special_tokens import read_special_tokens

logger = logging.getLogger(__name__)

_KINDS: Final = ("idefics3", "smolvlm")
_PROCESSOR, _NESTED = "preprocessor_config.json", "processor_config.json"
"""The second one has the first one's fields in `image_processor` since transformers 5, and has precedence then."""
_ACTIVATIONS: Final[dict[str, VisionActivation]] = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_FILTERS: Final = {1: "Lanczos", 2: "bilinear", 3: "bicubic"}
_TEXT_ONLY: Final = "or serve its text with --language-model-only"
_DEFAULT_IMAGE_TOKEN: Final = 128_257
_MAX_SIDE: Final = 1 << 14


def read_vision(folder: Path, config: Mapping[str, object], vocab_size: int) -> VisionSpec | None:
    """The tower of a folder; None: it has none, or none that the engine computes.

    Args:
        folder: the model's.
        config: the contents of its config.json.
        vocab_size: of its language model.

    Raises:
        ConfigError: a field is wrong, or needs something that is not implemented.
    """
    kind, inner = config.get("model_type"), config.get("vision_config")
    if kind not in _KINDS or not isinstance(inner, Mapping):
        return None
    processor = _processor_fields(folder)
    if processor is None:
        logger.warning(
            "%s: there is no %s, without which images cannot be prepared: only text is served",
            folder,
            _PROCESSOR,
        )
        return None
    path = folder / "config.json"
    outer, fields = Fields(path, config), Fields(path, inner, "vision_config.")
    image_size = fields.integer("image_size", 1, _MAX_SIDE, default=224)
    size = fields.integer("hidden_size", 1, 1 << 20, default=1152)
    activation = fields.text("hidden_act", default="gelu_pytorch_tanh")
    if activation not in _ACTIVATIONS:
        raise fields.error(
            "hidden_act", activation, f"expected one of {', '.join(_ACTIVATIONS)}, {_TEXT_ONLY}"
        )
    tokens = read_special_tokens(folder).named
    vision = VisionSpec(
        hidden_size=size,
        intermediate_size=fields.integer("intermediate_size", 1, 1 << 22, default=3072),
        num_layers=fields.integer("num_hidden_layers", 1, 1 << 12, default=12),
        num_heads=fields.integer("num_attention_heads", 1, 1 << 12, default=16),
        norm_eps=fields.number("layer_norm_eps", 1e-30, 1.0, default=1e-6),
        activation=_ACTIVATIONS[activation],
        image_size=image_size,
        patch_size=fields.integer("patch_size", 1, image_size, default=32),
        scale_factor=outer.integer("scale_factor", 1, 64, default=2),
        image_token_id=outer.integer("image_token_id", 0, vocab_size - 1, default=_DEFAULT_IMAGE_TOKEN),
        image_token=tokens.get("image_token", "<image>"),
        around_token=tokens.get("fake_image_token", "<fake_token_around_image>"),
        global_token=tokens.get("global_image_token", "<global-img>"),
        processing=_processing(processor, image_size),
    )
    if size % vision.num_heads:
        raise fields.error(
            "num_attention_heads", vision.num_heads, f"they cannot divide the hidden size {size}"
        )
    if vision.grid % vision.scale_factor:
        raise outer.error(
            "scale_factor",
            vision.scale_factor,
            f"which cannot divide the {vision.grid} patches of a tile's side",
        )
    return vision


def _processor_fields(folder: Path) -> Fields | None:
    nested = folder / _NESTED
    if nested.exists():
        inner = read_json(nested).get("image_processor")
        if isinstance(inner, Mapping):
            return Fields(nested, inner, "image_processor.")
    path = folder / _PROCESSOR
    return Fields(path, read_json(path)) if path.exists() else None


def _processing(fields: Fields, image_size: int) -> ImageProcessing:
    """How an image becomes tiles; the defaults are those of Idefics3's processor in transformers."""
    tile_size = _longest_edge(fields, "max_image_size", 364)
    if tile_size != image_size:
        raise fields.error(
            "max_image_size",
            fields.get("max_image_size"),
            f"but the tower sees tiles of {image_size} pixels; download the file again, {_TEXT_ONLY}",
        )
    resample = fields.integer("resample", 0, 5, default=1)
    if resample not in _FILTERS:
        known = ", ".join(f"{number} ({name})" for number, name in _FILTERS.items())
        raise fields.error("resample", resample, f"expected one of {known}, {_TEXT_ONLY}")
    rescales = fields.boolean("do_rescale", default=True)
    normalizes = fields.boolean("do_normalize", default=True)
    return ImageProcessing(
        longest_edge=_longest_edge(fields, "size", 4 * 364)
        if fields.boolean("do_resize", default=True)
        else None,
        tile_size=tile_size,
        splits=fields.boolean("do_image_splitting", default=True),
        resample=resample,
        rescale_factor=fields.number("rescale_factor", 1e-9, 1e9, default=1 / 255) if rescales else 1.0,
        mean=_by_color(fields, "image_mean", 0.0) if normalizes else (0.0, 0.0, 0.0),
        std=_by_color(fields, "image_std", 1e-9) if normalizes else (1.0, 1.0, 1.0),
    )


def _longest_edge(fields: Fields, name: str, default: int) -> int:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, Mapping) or "longest_edge" not in value:
        raise fields.error(name, value, f'expected {{"longest_edge": pixels}}, {_TEXT_ONLY}')
    return Fields(fields.path, value, f"{name}.").integer("longest_edge", 1, _MAX_SIDE)


def _by_color(fields: Fields, name: str, low: float) -> tuple[float, float, float]:
    value = fields.get(name)
    if value is None:
        return (0.5, 0.5, 0.5)
    numbers = value if isinstance(value, list) else [value] * 3
    if len(numbers) != 3 or any(
        isinstance(one, bool) or not isinstance(one, int | float) or not low <= one <= 1e9 for one in numbers
    ):
        raise fields.error(name, value, f"expected three numbers of at least {low:g}, one for each color")
    red, green, blue = map(float, numbers)
    return red, green, blue
