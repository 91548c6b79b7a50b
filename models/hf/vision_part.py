"""The tower of a multimodal folder: `vision_config` of config.json, and its processor's configuration.

Kinds of folders that are not in `_READERS` are served for their text only.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import structs

from ..fields import Fields
from ..spec.model_spec import ModelSpec
from ..spec.vision_spec import LLAMA4_TEXTS, ImageProcessing, VisionSpec
from .gemma4_vision_part import read_gemma4, read_gemma4_unified
from .llava_vision_part import read_llava, read_mistral3
from .qwen_vision_part import QWENS, read_qwen
from .special_tokens import read_special_tokens
from .vision_fields import (
    CLIP,
    MAX_SIDE,
    PROCESSOR,
    TEXT_ONLY,
    VisionFiles,
    expect,
    expect_theta,
    keeps_first_row,
    layers_used,
    longest_edge,
    other_size,
    processor_fields,
    square_tile,
    tower_facts,
    values_of_pixels,
)

logger = logging.getLogger(__name__)


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
        processing=square_tile(files.processor, facts["image_size"]),
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
    facts["num_layers"] = layers_used(outer, facts["num_layers"], -1)
    if keeps_first_row(outer):
        raise outer.error("vision_feature_select_strategy", "full", f"only default is supported, {TEXT_ONLY}")
    factor = _patches_of_row(outer, "downsample_ratio", facts)
    expect(outer, "projector_hidden_act", "gelu")
    most = files.processor.integer("max_patches", 1, 1 << 10, default=12)
    image = tokens.get("context_image_token", "<IMG_CONTEXT>")
    processing = square_tile(files.processor, facts["image_size"], resample=3, **CLIP)
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


def _llama4(files: VisionFiles) -> VisionSpec:
    """A tower of Llama 4, each 2 x 2 patches of which become a row."""
    inner, outer, processor = files.inner, files.outer, files.processor
    sides = {name: _side(inner, name, default) for name, default in (("image_size", 448), ("patch_size", 14))}
    facts = tower_facts(
        _with(inner, sides),
        hidden_size=768,
        num_heads=16,
        patch_size=14,
        activation="gelu",
        intermediate_size=5632,
        num_layers=34,
        activations={"gelu": "gelu"},
    )
    facts["norm_eps"] = 1e-5  # whatever `norm_eps` says
    expect_theta(inner)
    if facts["hidden_size"] % (4 * facts["num_heads"]):
        rule = f"they cannot divide the hidden size {facts['hidden_size']} into multiples of 4"
        raise inner.error("num_attention_heads", facts["num_heads"], rule)
    factor = _patches_of_row(inner, "pixel_shuffle_ratio", facts)
    width = inner.integer("projector_input_dim", 1, 1 << 20, default=4096)
    for name, default, wanted in (
        ("intermediate_size", 5632, facts["hidden_size"] * factor**2),
        ("projector_output_dim", 4096, width),
        ("vision_output_dim", 7680, width),
    ):
        found = inner.integer(name, 1, 1 << 22, default=default)
        if found != wanted:
            raise inner.error(name, found, f"expected {wanted} by the other sizes, {TEXT_ONLY}")
    expect(processor, "resize_to_max_canvas", False)
    most = processor.integer("max_patches", 1, 1 << 10, default=16)
    return VisionSpec(
        family="llama4",
        body="llama4",
        scale_factor=factor,
        connector_size=width,
        image_token_id=outer.integer(
            outer.given("image_token_index", "image_token_id"), 0, files.vocab_size - 1, default=200_092
        ),
        processing=structs.replace(
            square_tile(processor, facts["image_size"]), splits=most > 1, min_tiles=1, max_tiles=most
        ),
        **LLAMA4_TEXTS,
        **facts,
    )


_READERS: Final[dict[str, Callable[[VisionFiles], VisionSpec | None]]] = {
    **dict.fromkeys(QWENS, read_qwen),
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "llava": read_llava,
    "llava_next": read_llava,
    "internvl": _internvl,
    "mistral3": read_mistral3,
    "llama4": _llama4,
    "gemma3": _gemma3,
    "gemma4": read_gemma4,
    "gemma4_unified": read_gemma4_unified,
}


def _patches_of_row(fields: Fields, name: str, facts: Mapping[str, Any]) -> int:
    """Patches in each direction that become a row, of which files have the inverse."""
    ratio = fields.number(name, 0.01, 1.0, default=0.5)
    grid, factor = facts["image_size"] // facts["patch_size"], int(1 / ratio)
    if factor * ratio != 1 or grid % factor:
        rule = f"expected 1 divided by a number that divides the {grid} patches of a tile's side"
        raise fields.error(name, ratio, rule)
    return factor


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
        raise other_size(fields, "max_image_size", image_size)
    return ImageProcessing(
        longest_edge=longest_edge(fields, "size", 4 * 364)
        if fields.boolean("do_resize", default=True)
        else None,
        tile_size=tile_size,
        splits=fields.boolean("do_image_splitting", default=True),
        **values_of_pixels(fields, resample=1),
    )
