"""The tower of a multimodal folder: `vision_config` of config.json, and its processor's configuration.

Kinds of folders that are not in `_READERS` are served for their text only.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...runtime.errors import ConfigError
from ..fields import Fields
from ..model_files import read_json
from ..spec.vision_spec import ImageProcessing, VisionActivation, VisionSpec
from .special_tokens import read_special_tokens

logger = logging.getLogger(__name__)

_PROCESSOR, _NESTED = "preprocessor_config.json", "processor_config.json"
"""The second one has the first one's fields in `image_processor` since transformers 5, and has precedence then."""
_ACTIVATIONS: Final[dict[str, VisionActivation]] = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_FILTERS: Final = {1: "Lanczos", 2: "bilinear", 3: "bicubic"}
_TEXT_ONLY: Final = "or serve its text with --language-model-only"
_MAX_SIDE: Final = 1 << 14
_SQUARE: Final = {"height": 224, "width": 224}


class _Files(NamedTuple):
    """The parts of a folder that a reader of a family reads: config.json and its `vision_config`, the processor's
    configuration, and the special tokens by name.
    """

    outer: Fields
    inner: Fields
    processor: Fields
    tokens: Mapping[str, str]
    vocab_size: int


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
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None or not isinstance(inner, Mapping):
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
    return read(_Files(outer, fields, processor, read_special_tokens(folder).named, vocab_size))


def _idefics3(files: _Files) -> VisionSpec:
    facts = _tower(files.inner, hidden_size=1152, num_heads=16, patch_size=32)
    tokens, outer = files.tokens, files.outer
    image, around = (
        tokens.get("image_token", "<image>"),
        tokens.get("fake_image_token", "<fake_token_around_image>"),
    )
    vision = VisionSpec(
        family="idefics3",
        scale_factor=outer.integer("scale_factor", 1, 64, default=2),
        image_token_id=outer.integer("image_token_id", 0, files.vocab_size - 1, default=128_257),
        image_token=image,
        begin_token=around,
        end_token=around,
        global_token=tokens.get("global_image_token", "<global-img>"),
        marker=image,
        processing=_tiles(files.processor, facts["image_size"]),
        **facts,
    )
    if vision.grid % vision.scale_factor:
        raise outer.error(
            "scale_factor",
            vision.scale_factor,
            f"which cannot divide the {vision.grid} patches of a tile's side",
        )
    return vision


def _gemma3(files: _Files) -> VisionSpec:
    facts = _tower(files.inner, hidden_size=768, num_heads=12, patch_size=16)
    tokens, outer, grid = files.tokens, files.outer, facts["image_size"] // facts["patch_size"]
    num_rows = outer.integer("mm_tokens_per_image", 1, grid**2, default=256)
    side = math.isqrt(num_rows)
    if side**2 != num_rows or grid % side:
        raise outer.error(
            "mm_tokens_per_image",
            num_rows,
            f"expected the square of a number that divides the {grid} patches of an image's side",
        )
    begin = tokens.get("boi_token", "<start_of_image>")
    id_name = outer.given("image_token_index", "image_token_id")
    return VisionSpec(
        family="gemma3",
        scale_factor=grid // side,
        sees_whole=True,
        image_token_id=outer.integer(id_name, 0, files.vocab_size - 1, default=262_144),
        image_token=tokens.get("image_token", "<image_soft_token>"),
        begin_token=begin,
        end_token=tokens.get("eoi_token", "<end_of_image>"),
        marker=begin,
        processing=_square(files.processor, facts["image_size"]),
        **facts,
    )


_READERS: Final[dict[str, Callable[[_Files], VisionSpec]]] = {
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
}


def _tower(fields: Fields, *, hidden_size: int, num_heads: int, patch_size: int) -> dict[str, Any]:
    """The sizes of a SigLIP tower; the arguments are the defaults in transformers."""
    image_size = fields.integer("image_size", 1, _MAX_SIDE, default=224)
    size = fields.integer("hidden_size", 1, 1 << 20, default=hidden_size)
    num_heads = fields.integer("num_attention_heads", 1, 1 << 12, default=num_heads)
    if size % num_heads:
        raise fields.error("num_attention_heads", num_heads, f"they cannot divide the hidden size {size}")
    activation = fields.text("hidden_act", default="gelu_pytorch_tanh")
    if activation not in _ACTIVATIONS:
        raise fields.error(
            "hidden_act", activation, f"expected one of {', '.join(_ACTIVATIONS)}, {_TEXT_ONLY}"
        )
    return {
        "hidden_size": size,
        "intermediate_size": fields.integer("intermediate_size", 1, 1 << 22, default=3072),
        "num_layers": fields.integer("num_hidden_layers", 1, 1 << 12, default=12),
        "num_heads": num_heads,
        "norm_eps": fields.number("layer_norm_eps", 1e-30, 1.0, default=1e-6),
        "activation": _ACTIVATIONS[activation],
        "image_size": image_size,
        "patch_size": fields.integer("patch_size", 1, image_size, default=patch_size),
    }


def _processor_fields(folder: Path) -> Fields | None:
    nested = folder / _NESTED
    if nested.exists():
        inner = read_json(nested).get("image_processor")
        if isinstance(inner, Mapping):
            return Fields(nested, inner, "image_processor.")
    path = folder / _PROCESSOR
    return Fields(path, read_json(path)) if path.exists() else None


def _tiles(fields: Fields, image_size: int) -> ImageProcessing:
    """How an image becomes tiles; the defaults are those of Idefics3's processor in transformers."""
    tile_size = _longest_edge(fields, "max_image_size", 364)
    if tile_size != image_size:
        raise _other_size(fields, "max_image_size", image_size)
    return ImageProcessing(
        longest_edge=_longest_edge(fields, "size", 4 * 364)
        if fields.boolean("do_resize", default=True)
        else None,
        tile_size=tile_size,
        splits=fields.boolean("do_image_splitting", default=True),
        **_values(fields, resample=1),
    )


def _square(fields: Fields, image_size: int) -> ImageProcessing:
    """How an image becomes one square tile, as Gemma 3's processor in transformers does without pan and scan."""
    for name, wanted in (("do_pan_and_scan", False), ("do_resize", True)):
        if fields.boolean(name, default=wanted) != wanted:
            raise fields.error(name, not wanted, f"only {str(wanted).lower()} is supported, {_TEXT_ONLY}")
    size = fields.get("size")
    if (size if size is not None else _SQUARE) != {"height": image_size, "width": image_size}:
        raise _other_size(fields, "size", image_size)
    return ImageProcessing(
        longest_edge=None, tile_size=image_size, splits=False, **_values(fields, resample=2)
    )


def _other_size(fields: Fields, name: str, image_size: int) -> ConfigError:
    rule = f"but the tower sees tiles of {image_size} pixels; download the file again, {_TEXT_ONLY}"
    return fields.error(name, fields.get(name), rule)


def _values(fields: Fields, *, resample: int) -> dict[str, Any]:
    """The filter and the numbers that make values of pixels, with the default filter."""
    resample = fields.integer("resample", 0, 5, default=resample)
    if resample not in _FILTERS:
        known = ", ".join(f"{number} ({name})" for number, name in _FILTERS.items())
        raise fields.error("resample", resample, f"expected one of {known}, {_TEXT_ONLY}")
    rescales = fields.boolean("do_rescale", default=True)
    normalizes = fields.boolean("do_normalize", default=True)
    return {
        "resample": resample,
        "rescale_factor": fields.number("rescale_factor", 1e-9, 1e9, default=1 / 255) if rescales else 1.0,
        "mean": _by_color(fields, "image_mean", 0.0) if normalizes else (0.0, 0.0, 0.0),
        "std": _by_color(fields, "image_std", 1e-9) if normalizes else (1.0, 1.0, 1.0),
    }


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
