"""`VisionFiles`: the parts of a folder that the readers of towers take, and what these have in common."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...runtime.errors import ConfigError
from ..fields import Fields
from ..model_files import read_json
from ..spec.vision_spec import ImageProcessing, VisionActivation

PROCESSOR, _NESTED = "preprocessor_config.json", "processor_config.json"
"""The second one has the first one's fields in `image_processor` since transformers 5, and has precedence then."""
ACTIVATIONS: Final[dict[str, VisionActivation]] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
CLIP: Final = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
"""Normalization of CLIP, the default of some processors."""
_FILTERS: Final = {1: "Lanczos", 2: "bilinear", 3: "bicubic"}
TEXT_ONLY: Final = "or serve its text with --language-model-only"
MAX_SIDE: Final = 1 << 14
Color = tuple[float, float, float]
HALF: Final[Color] = (0.5, 0.5, 0.5)
_SQUARE: Final = {"height": 224, "width": 224}


class VisionFiles(NamedTuple):
    """The parts of a folder that a reader of a family reads: config.json and its `vision_config`, the processor's
    configuration, the special tokens by name, and of the language model the size of the vocabulary, the hidden size,
    and the pairs of dimensions of a head that turn.
    """

    outer: Fields
    inner: Fields
    processor: Fields
    tokens: Mapping[str, str]
    vocab_size: int
    hidden_size: int
    num_turning: int


def processor_fields(folder: Path) -> Fields | None:
    """The configuration of the folder's processor of images; None: it has none."""
    nested = folder / _NESTED
    if nested.exists():
        inner = read_json(nested).get("image_processor")
        if isinstance(inner, Mapping):
            return Fields(nested, inner, "image_processor.")
    path = folder / PROCESSOR
    return Fields(path, read_json(path)) if path.exists() else None


def tower_facts(
    fields: Fields,
    *,
    hidden_size: int,
    num_heads: int,
    patch_size: int,
    activation: str = "gelu_pytorch_tanh",
    norm_eps: float = 1e-6,
    intermediate_size: int = 3072,
    num_layers: int = 12,
    activations: Mapping[str, VisionActivation] = ACTIVATIONS,
) -> dict[str, Any]:
    """The sizes of a tower; the arguments are the defaults in transformers, mostly those of SigLIP."""
    image_size = fields.integer("image_size", 1, MAX_SIDE, default=224)
    size = fields.integer("hidden_size", 1, 1 << 20, default=hidden_size)
    num_heads = fields.integer("num_attention_heads", 1, 1 << 12, default=num_heads)
    if size % num_heads:
        raise fields.error("num_attention_heads", num_heads, f"they cannot divide the hidden size {size}")
    activation = fields.text("hidden_act", default=activation)
    if activation not in activations:
        raise fields.error("hidden_act", activation, f"expected one of {', '.join(activations)}, {TEXT_ONLY}")
    return {
        "hidden_size": size,
        "intermediate_size": fields.integer("intermediate_size", 1, 1 << 22, default=intermediate_size),
        "num_layers": fields.integer("num_hidden_layers", 1, 1 << 12, default=num_layers),
        "num_heads": num_heads,
        "norm_eps": fields.number("layer_norm_eps", 1e-30, 1.0, default=norm_eps),
        "activation": activations[activation],
        "image_size": image_size,
        "patch_size": fields.integer("patch_size", 1, image_size, default=patch_size),
    }


def values_of_pixels(
    fields: Fields,
    *,
    resample: int,
    mean: tuple[float, float, float] = HALF,
    std: tuple[float, float, float] = HALF,
) -> dict[str, Any]:
    """The filter and the numbers that make values of pixels; the arguments are the defaults."""
    resample = fields.integer("resample", 0, 5, default=resample)
    if resample not in _FILTERS:
        known = ", ".join(f"{number} ({name})" for number, name in _FILTERS.items())
        raise fields.error("resample", resample, f"expected one of {known}, {TEXT_ONLY}")
    rescales = fields.boolean("do_rescale", default=True)
    normalizes = fields.boolean("do_normalize", default=True)
    return {
        "resample": resample,
        "rescale_factor": fields.number("rescale_factor", 1e-9, 1e9, default=1 / 255) if rescales else 1.0,
        "mean": _by_color(fields, "image_mean", 0.0, mean) if normalizes else (0.0, 0.0, 0.0),
        "std": _by_color(fields, "image_std", 1e-9, std) if normalizes else (1.0, 1.0, 1.0),
    }


def longest_edge(fields: Fields, name: str, default: int) -> int:
    """The pixels in a field with `{"longest_edge": pixels}`."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, Mapping) or "longest_edge" not in value:
        raise fields.error(name, value, f'expected {{"longest_edge": pixels}}, {TEXT_ONLY}')
    return Fields(fields.path, value, f"{name}.").integer("longest_edge", 1, MAX_SIDE)


def _by_color(
    fields: Fields, name: str, low: float, default: tuple[float, float, float]
) -> tuple[float, float, float]:
    value = fields.get(name)
    if value is None:
        return default
    numbers = value if isinstance(value, list) else [value] * 3
    if len(numbers) != 3 or any(
        isinstance(one, bool) or not isinstance(one, int | float) or not low <= one <= 1e9 for one in numbers
    ):
        raise fields.error(name, value, f"expected three numbers of at least {low:g}, one for each color")
    red, green, blue = map(float, numbers)
    return red, green, blue


def expect(fields: Fields, name: str, value: object) -> None:
    """Refuse another value than this one; a missing field has it."""
    if (fields.get(name) if fields.get(name) is not None else value) != value:
        raise fields.error(name, fields.get(name), f"expected {value!r}, {TEXT_ONLY}")


def expect_theta(fields: Fields, theta: float = 10_000.0) -> None:
    """Refuse another base of rotary embeddings; newer files have it in `rope_parameters`."""
    rope = fields.get("rope_parameters")
    inner = Fields(fields.path, rope if isinstance(rope, Mapping) else {}, "vision_config.rope_parameters.")
    for each in (fields, inner):
        expect(each, "rope_theta", theta)


def layers_used(fields: Fields, num_layers: int, default: int) -> int:
    """Layers up to the one whose output goes on: the last is -1."""
    layer = fields.get("vision_feature_layer")
    if isinstance(layer, list) and len(layer) == 1:
        layer = layer[0]
    if layer is None:
        layer = default
    used = layer + (num_layers + 1 if layer < 0 else 0) if isinstance(layer, int) else 0
    if isinstance(layer, bool) or not 1 <= used <= num_layers:
        rule = f"expected the number of one of the {num_layers} layers, {TEXT_ONLY}"
        raise fields.error("vision_feature_layer", layer, rule)
    return used


def keeps_first_row(fields: Fields) -> bool:
    """Whether the row of the class goes on, which is before those of the patches."""
    strategy = fields.text("vision_feature_select_strategy", default="default")
    if strategy not in ("default", "full"):
        raise fields.error("vision_feature_select_strategy", strategy, "expected default or full")
    return strategy == "full"


def square_tile(
    fields: Fields, image_size: int, *, resample: int = 2, mean: Color = HALF, std: Color = HALF
) -> ImageProcessing:
    """How an image becomes one square tile, as Gemma 3's processor in transformers does without pan and scan."""
    for name, wanted in (("do_pan_and_scan", False), ("do_resize", True)):
        if fields.boolean(name, default=wanted) != wanted:
            raise fields.error(name, not wanted, f"only {str(wanted).lower()} is supported, {TEXT_ONLY}")
    size = fields.get("size")
    if (size if size is not None else _SQUARE) != {"height": image_size, "width": image_size}:
        raise other_size(fields, "size", image_size)
    return ImageProcessing(
        longest_edge=None,
        tile_size=image_size,
        splits=False,
        **values_of_pixels(fields, resample=resample, mean=mean, std=std),
    )


def other_size(fields: Fields, name: str, image_size: int) -> ConfigError:
    """The error for a processor that makes tiles of another size than the tower takes."""
    rule = f"but the tower sees tiles of {image_size} pixels; download the file again, {TEXT_ONLY}"
    return fields.error(name, fields.get(name), rule)
