"""The tower of a multimodal folder: `vision_config` of config.json, and its processor's configuration.

Kinds of folders that are not in `_READERS` are served for their text only.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from msgspec import structs

from ...runtime.errors import ConfigError
from ..fields import Fields
from ..spec.model_spec import ModelSpec
from ..spec.vision_spec import ImageProcessing, VisionSpec
from .qwen_vision_part import QWENS, read_qwen
from .special_tokens import read_special_tokens
from .vision_fields import (
    CLIP,
    HALF,
    MAX_SIDE,
    PROCESSOR,
    TEXT_ONLY,
    Color,
    VisionFiles,
    expect,
    longest_edge,
    processor_fields,
    tower_facts,
    values_of_pixels,
)

logger = logging.getLogger(__name__)

_SQUARE: Final = {"height": 224, "width": 224}
_PINPOINTS: Final = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


def read_vision(folder: Path, config: Mapping[str, object], spec: ModelSpec) -> VisionSpec | None:
    """The tower of a folder; None: it has none, or none that the engine computes.

    Args:
        folder: the model's.
        config: the contents of its config.json.
        spec: of its language model.

    Raises:
        ConfigError: a field is wrong, or needs something that is not implemented.
    """
    kind, inner = config.get("model_type"), config.get("vision_config")
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None or not isinstance(inner, Mapping):
        return None
    processor = processor_fields(folder)
    if processor is None:
        logger.warning(
            "%s: there is no %s, without which images cannot be prepared: only text is served",
            folder,
            PROCESSOR,
        )
        return None
    path = folder / "config.json"
    outer, fields = Fields(path, config), Fields(path, inner, "vision_config.")
    tokens, num_turning = read_special_tokens(folder).named, (spec.rotary_dim or spec.head_dim) // 2
    return read(VisionFiles(outer, fields, processor, tokens, spec.vocab_size, spec.hidden_size, num_turning))


def _idefics3(files: VisionFiles) -> VisionSpec:
    facts = tower_facts(files.inner, hidden_size=1152, num_heads=16, patch_size=32)
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


def _gemma3(files: VisionFiles) -> VisionSpec:
    facts = tower_facts(files.inner, hidden_size=768, num_heads=12, patch_size=16)
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


def _llava(files: VisionFiles) -> VisionSpec | None:
    """A tower of CLIP, or of SigLIP, of which the output of a layer before the last is used; or that of Pixtral 12B."""
    inner, outer = files.inner, files.outer
    kind = inner.text("model_type", default="clip_vision_model")
    is_next = outer.get("model_type") == "llava_next"
    known = ("clip_vision_model",) if is_next else ("clip_vision_model", "siglip_vision_model", "pixtral")
    if kind not in known:
        logger.warning(
            "%s: vision_config.model_type is %r, and of this model only %s can be computed: only text is served",
            outer.path,
            kind,
            ", ".join(known),
        )
        return None
    if kind == "pixtral":
        if not _keeps_first_row(outer):
            raise outer.error(
                "vision_feature_select_strategy",
                "default",
                f"but Pixtral has no row for the class to leave out, {TEXT_ONLY}",
            )
        return _pixtral(files, 1, has_mlp_bias=True)
    is_clip = kind == "clip_vision_model"
    facts = tower_facts(
        inner,
        hidden_size=768,
        num_heads=12,
        patch_size=32 if is_clip else 16,
        activation="quick_gelu" if is_clip else "gelu_pytorch_tanh",
        norm_eps=1e-5 if is_clip else 1e-6,
    )
    facts["num_layers"] = _layers_used(outer, facts["num_layers"], -2)
    keeps = _keeps_first_row(outer)
    if is_next:
        expect(outer, "vision_feature_select_strategy", "default")
    if not is_clip and not keeps:
        raise outer.error(
            "vision_feature_select_strategy",
            "default",
            f"but SigLIP has no row for the class to leave out, {TEXT_ONLY}",
        )
    expect(outer, "projector_hidden_act", "gelu")
    if is_clip and not is_next:  # there it means the number of tiles
        expect(files.processor, "do_pad", False)
    image = files.tokens.get("image_token", "<image>")
    id_name = outer.given("image_token_index", "image_token_id")
    image_size = facts["image_size"]
    processing = _crop(files.processor, image_size) if is_clip else _square(files.processor, image_size)
    if is_next:
        pinpoints = _pinpoints(outer, files.processor, image_size)
        processing = structs.replace(processing, crops=False, splits=True, pinpoints=pinpoints)
    return VisionSpec(
        family="llava_next" if is_next else "llava",
        body="clip" if is_clip else "siglip",
        ends_normed=False,
        keeps_class=is_clip and keeps,
        has_mlp_bias=outer.boolean("multimodal_projector_bias", default=True),
        scale_factor=1,
        image_token_id=outer.integer(id_name, 0, files.vocab_size - 1, default=32_000),
        image_token=image,
        begin_token="",
        end_token="",
        marker=image,
        processing=processing,
        **facts,
    )


def _internvl(files: VisionFiles) -> VisionSpec:
    """A tower of InternViT, each 2 x 2 patches of which become a row."""
    inner, outer, tokens = files.inner, files.outer, files.tokens
    sides = {name: _side(inner, name, default) for name, default in (("image_size", 448), ("patch_size", 14))}
    for name, wanted in (("norm_type", "layer_norm"), ("use_qk_norm", False), ("use_mean_pooling", True)):
        value = inner.get(name)
        if value is not None and value != wanted:
            raise inner.error(name, value, f"expected {wanted!r}: a tower of InternViT-300M, {TEXT_ONLY}")
    facts = tower_facts(
        _with(inner, sides),
        hidden_size=1024,
        num_heads=16,
        patch_size=14,
        activation="gelu",
        intermediate_size=4096,
        num_layers=24,
    )
    facts["num_layers"] = _layers_used(outer, facts["num_layers"], -1)
    if _keeps_first_row(outer):
        raise outer.error("vision_feature_select_strategy", "full", f"only default is supported, {TEXT_ONLY}")
    ratio = outer.number("downsample_ratio", 0.01, 1.0, default=0.5)
    grid, factor = facts["image_size"] // facts["patch_size"], int(1 / ratio)
    if factor * ratio != 1 or grid % factor:
        rule = f"expected 1 divided by a number that divides the {grid} patches of a tile's side"
        raise outer.error("downsample_ratio", ratio, rule)
    expect(outer, "projector_hidden_act", "gelu")
    most = files.processor.integer("max_patches", 1, 1 << 10, default=12)
    image = tokens.get("context_image_token", "<IMG_CONTEXT>")
    processing = _square(files.processor, facts["image_size"], resample=3, **CLIP)
    return VisionSpec(
        family="internvl",
        body="internvit",
        ends_normed=False,
        has_qkv_bias=inner.boolean("attention_bias", default=False),
        scale_factor=factor,
        image_token_id=outer.integer("image_token_id", 0, files.vocab_size - 1, default=151_667),
        image_token=image,
        begin_token=tokens.get("start_image_token", "<img>"),
        end_token=tokens.get("end_image_token", "</img>"),
        marker=image,
        processing=structs.replace(
            processing,
            splits=most > 1,  # the processor asks for it, whatever crop_to_patches says
            min_tiles=files.processor.integer("min_patches", 1, most, default=1),
            max_tiles=most,
        ),
        **facts,
    )


def _mistral3(files: VisionFiles) -> VisionSpec:
    """A tower of Pixtral, and a merger of patches."""
    expect(files.inner, "model_type", "pixtral")
    return _pixtral(files, files.outer.integer("spatial_merge_size", 2, 64, default=2), has_mlp_bias=False)


def _pixtral(files: VisionFiles, factor: int, *, has_mlp_bias: bool) -> VisionSpec:
    """A tower of Pixtral, rows of which are made of `factor` x `factor` patches; `has_mlp_bias`: the default."""
    inner, outer, tokens = files.inner, files.outer, files.tokens
    expect(outer, "projector_hidden_act", "gelu")
    rope = inner.get("rope_parameters")
    of_rope = Fields(inner.path, rope if isinstance(rope, Mapping) else {}, "vision_config.rope_parameters.")
    for fields in (inner, of_rope):
        expect(fields, "rope_theta", 10_000.0)
    facts = tower_facts(
        inner,
        hidden_size=1024,
        num_heads=16,
        patch_size=14,
        activation="gelu",
        intermediate_size=4096,
        num_layers=24,
        activations={"gelu": "gelu", "silu": "silu"},
    )
    if _layers_used(outer, facts["num_layers"], -1) != facts["num_layers"]:
        raise outer.error(
            "vision_feature_layer", outer.get("vision_feature_layer"), f"expected -1, {TEXT_ONLY}"
        )
    size, num_heads = facts["hidden_size"], facts["num_heads"]
    if size % (4 * num_heads):
        raise inner.error(
            "num_attention_heads", num_heads, f"they cannot divide the hidden size {size} into multiples of 4"
        )
    expect(inner, "head_dim", size // num_heads)
    multiple = facts["patch_size"] * factor
    longest = longest_edge(files.processor, "size", 1024)
    whole = -(-longest // multiple) * multiple
    image, facts["norm_eps"], facts["image_size"] = tokens.get("image_token", "[IMG]"), 1e-5, 0
    expect(files.processor, "do_resize", True)
    return VisionSpec(
        family="pixtral",
        scale_factor=factor,
        has_mlp_bias=outer.boolean("multimodal_projector_bias", default=has_mlp_bias),
        image_token_id=outer.integer(
            outer.given("image_token_index", "image_token_id"), 0, files.vocab_size - 1, default=10
        ),
        image_token=image,
        begin_token=tokens.get("image_break_token", "[IMG_BREAK]"),
        end_token=tokens.get("image_end_token", "[IMG_END]"),
        marker=image,
        processing=ImageProcessing(
            longest_edge=longest,
            tile_size=multiple,
            splits=True,
            max_pixels=whole**2,
            **values_of_pixels(files.processor, resample=3, **CLIP),
        ),
        **facts,
    )


_READERS: Final[dict[str, Callable[[VisionFiles], VisionSpec | None]]] = {
    **dict.fromkeys(QWENS, read_qwen),
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "llava": _llava,
    "llava_next": _llava,
    "internvl": _internvl,
    "mistral3": _mistral3,
    "gemma3": _gemma3,
}


def _layers_used(fields: Fields, num_layers: int, default: int) -> int:
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


def _keeps_first_row(fields: Fields) -> bool:
    strategy = fields.text("vision_feature_select_strategy", default="default")
    if strategy not in ("default", "full"):
        raise fields.error("vision_feature_select_strategy", strategy, "expected default or full")
    return strategy == "full"


def _side(fields: Fields, name: str, default: int) -> int:
    """A side of a square, which files have twice or once."""
    value = fields.get(name)
    if isinstance(value, list):
        if len(value) != 2 or value[0] != value[1]:
            raise fields.error(name, value, f"expected the same number twice, {TEXT_ONLY}")
        value = value[0]
    return Fields(fields.path, {name: value}, "vision_config.").integer(name, 1, MAX_SIDE, default=default)


def _with(fields: Fields, values: Mapping[str, object]) -> Fields:
    return Fields(fields.path, {**{name: fields.get(name) for name in fields}, **values}, "vision_config.")


def _tiles(fields: Fields, image_size: int) -> ImageProcessing:
    """How an image becomes tiles; the defaults are those of Idefics3's processor in transformers."""
    tile_size = longest_edge(fields, "max_image_size", 364)
    if tile_size != image_size:
        raise _other_size(fields, "max_image_size", image_size)
    return ImageProcessing(
        longest_edge=longest_edge(fields, "size", 4 * 364)
        if fields.boolean("do_resize", default=True)
        else None,
        tile_size=tile_size,
        splits=fields.boolean("do_image_splitting", default=True),
        **values_of_pixels(fields, resample=1),
    )


def _pinpoints(outer: Fields, processor: Fields, image_size: int) -> tuple[tuple[int, int], ...]:
    """Heights and widths to which images of LLaVA-NeXT are padded, which the model and its processor both have."""
    name = "image_grid_pinpoints"
    found = [
        fields.get(name) if fields.get(name) is not None else _PINPOINTS for fields in (outer, processor)
    ]
    if found[0] != found[1]:
        raise processor.error(
            name, found[1], f"but config.json has {found[0]}; download both again, {TEXT_ONLY}"
        )
    pinpoints = (
        [tuple(each) if isinstance(each, list) else () for each in found[0]]
        if isinstance(found[0], list)
        else []
    )
    sides = {side for each in pinpoints for side in each}
    is_whole = all(
        isinstance(side, int) and image_size <= side <= MAX_SIDE and not side % image_size for side in sides
    )
    if not pinpoints or not is_whole or any(len(each) != 2 for each in pinpoints):
        rule = f"expected a list of heights and widths that are multiples of {image_size}, the side of a tile"
        raise outer.error(name, found[0], f"{rule}, {TEXT_ONLY}")
    return tuple((height, width) for height, width in pinpoints)


def _crop(fields: Fields, image_size: int) -> ImageProcessing:
    """How the middle of an image becomes one square tile, as in CLIP's processor in transformers."""
    for name in ("do_resize", "do_center_crop"):
        if not fields.boolean(name, default=True):
            raise fields.error(name, False, f"only true is supported, {TEXT_ONLY}")
    for name, wanted in (("size", ["shortest_edge"]), ("crop_size", ["height", "width"])):
        value = fields.get(name)
        sizes = (
            [value] * 2
            if isinstance(value, int)
            else [*value.values()]
            if isinstance(value, Mapping)
            else [224]
        )
        if (isinstance(value, Mapping) and sorted(value) != wanted) or set(sizes) != {image_size}:
            raise _other_size(fields, name, image_size)
    return ImageProcessing(
        longest_edge=None,
        tile_size=image_size,
        splits=False,
        crops=True,
        **values_of_pixels(fields, resample=3, **CLIP),
    )


def _square(
    fields: Fields, image_size: int, *, resample: int = 2, mean: Color = HALF, std: Color = HALF
) -> ImageProcessing:
    """How an image becomes one square tile, as Gemma 3's processor in transformers does without pan and scan."""
    for name, wanted in (("do_pan_and_scan", False), ("do_resize", True)):
        if fields.boolean(name, default=wanted) != wanted:
            raise fields.error(name, not wanted, f"only {str(wanted).lower()} is supported, {TEXT_ONLY}")
    size = fields.get("size")
    if (size if size is not None else _SQUARE) != {"height": image_size, "width": image_size}:
        raise _other_size(fields, "size", image_size)
    return ImageProcessing(
        longest_edge=None,
        tile_size=image_size,
        splits=False,
        **values_of_pixels(fields, resample=resample, mean=mean, std=std),
    )


def _other_size(fields: Fields, name: str, image_size: int) -> ConfigError:
    rule = f"but the tower sees tiles of {image_size} pixels; download the file again, {TEXT_ONLY}"
    return fields.error(name, fields.get(name), rule)
