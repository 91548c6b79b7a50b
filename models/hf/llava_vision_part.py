"""`read_llava` and `read_mistral3`: the towers of LLaVA 1.5 and LLaVA-NeXT, and Pixtral's, in their folders."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from msgspec import structs

from ..fields import Fields
from ..spec.vision_spec import ImageProcessing, VisionSpec
from .vision_fields import (
    CLIP,
    MAX_SIDE,
    TEXT_ONLY,
    VisionFiles,
    expect,
    expect_theta,
    keeps_first_row,
    layers_used,
    longest_edge,
    other_size,
    square_tile,
    tower_facts,
    values_of_pixels,
)

logger = logging.getLogger(__name__)

_PINPOINTS: Final = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


def read_llava(files: VisionFiles) -> VisionSpec | None:
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
        if not keeps_first_row(outer):
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
    facts["num_layers"] = layers_used(outer, facts["num_layers"], -2)
    keeps = keeps_first_row(outer)
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
    processing = _crop(files.processor, image_size) if is_clip else square_tile(files.processor, image_size)
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


def read_mistral3(files: VisionFiles) -> VisionSpec:
    """A tower of Pixtral, and a merger of patches."""
    expect(files.inner, "model_type", "pixtral")
    return _pixtral(files, files.outer.integer("spatial_merge_size", 2, 64, default=2), has_mlp_bias=False)


def _pixtral(files: VisionFiles, factor: int, *, has_mlp_bias: bool) -> VisionSpec:
    """A tower of Pixtral, rows of which are made of `factor` x `factor` patches; `has_mlp_bias`: the default."""
    inner, outer, tokens = files.inner, files.outer, files.tokens
    expect(outer, "projector_hidden_act", "gelu")
    expect_theta(inner)
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
    if layers_used(outer, facts["num_layers"], -1) != facts["num_layers"]:
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
            raise other_size(fields, name, image_size)
    return ImageProcessing(
        longest_edge=None,
        tile_size=image_size,
        splits=False,
        crops=True,
        **values_of_pixels(fields, resample=3, **CLIP),
    )
