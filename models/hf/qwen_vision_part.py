"""The towers of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: `vision_config` and the processor's configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from ..fields import Fields
from ..spec.vision_spec import FRAMES, ImageProcessing, VisionFamily, VisionSpec
from .vision_fields import ACTIVATIONS, CLIP, MAX_SIDE, VisionFiles, expect, values_of_pixels


class _Qwen(NamedTuple):
    """Defaults of transformers for a tower of Qwen, whose family and `model_type` of the tower these are.

    `size`: the field with the width of the tower, which Qwen2-VL names in another way.
    """

    family: VisionFamily
    layers: int
    hidden: int
    inner: int
    patch: int
    activation: str
    sections: tuple[int, ...]
    size: str = "hidden_size"
    positions: int = 0
    window: int = 0
    whole: tuple[int, ...] = ()
    deepstack: tuple[int, ...] = ()
    alternates: bool = False


QWENS: Final = {
    "qwen2_vl": _Qwen("qwen2_vl", 32, 1280, 0, 14, "quick_gelu", (16, 24, 24), size="embed_dim"),
    "qwen2_5_vl": _Qwen(
        "qwen2_5_vl", 32, 3584, 3420, 14, "silu", (16, 24, 24), window=112, whole=(7, 15, 23, 31)
    ),
    "qwen3_vl": _Qwen(
        "qwen3_vl",
        27,
        1152,
        4304,
        16,
        "gelu_pytorch_tanh",
        (24, 20, 20),
        positions=2304,
        deepstack=(8, 16, 24),
        alternates=True,
    ),
}
QWENS["qwen3_vl_moe"] = QWENS["qwen3_vl"]
QWENS["qwen3_5"] = QWENS["qwen3_5_moe"] = QWENS["qwen3_vl"]._replace(sections=(11, 11, 10), deepstack=())


def read_qwen(files: VisionFiles) -> VisionSpec:
    """The tower of a folder whose `model_type` is in `QWENS`.

    Raises:
        ConfigError: a field is wrong, or needs something that is not implemented.
    """
    fields, tokens, known = files.inner, files.tokens, QWENS[files.outer.text("model_type")]
    size = fields.integer(known.size, 1, 1 << 20, default=known.hidden)
    num_heads = fields.integer(fields.given("num_heads", "num_attention_heads"), 1, 1 << 12, default=16)
    if size % (4 * num_heads):
        raise fields.error(
            "num_heads", num_heads, f"they cannot divide the hidden size {size} into multiples of 4"
        )
    inner = size * fields.integer("mlp_ratio", 1, 64, default=4)
    if known.inner:
        inner = fields.integer("intermediate_size", 1, 1 << 22, default=known.inner)
    expect(fields, "hidden_act", known.activation)
    expect(fields, "temporal_patch_size", FRAMES)
    expect(fields, fields.given("in_channels", "in_chans"), 3)
    out_size = "hidden_size" if known.size == "embed_dim" else "out_hidden_size"
    if fields.integer(out_size, 1, 1 << 20, default=files.hidden_size) != files.hidden_size:
        rule = f"but the language model has {files.hidden_size}; download the file again"
        raise fields.error(out_size, fields.get(out_size), rule)
    layers = fields.integer(fields.given("depth", "num_hidden_layers"), 1, 1 << 12, default=known.layers)
    patch_size = fields.integer("patch_size", 1, MAX_SIDE, default=known.patch)
    factor = fields.integer("spatial_merge_size", 1, 64, default=2)
    window = fields.integer("window_size", 1, MAX_SIDE, default=known.window) if known.window else 0
    if window and window < patch_size * factor:
        raise fields.error(
            "window_size", window, f"expected at least {patch_size * factor}, the pixels of a row"
        )
    positions = (
        fields.integer("num_position_embeddings", 1, 1 << 20, default=known.positions)
        if known.positions
        else 0
    )
    if math.isqrt(positions) ** 2 != positions:
        raise fields.error("num_position_embeddings", positions, "expected a square")
    for name, value in (("patch_size", patch_size), ("merge_size", factor), ("temporal_patch_size", FRAMES)):
        expect(files.processor, name, value)
    sections, alternates = _sections(files, known)
    return VisionSpec(
        family=known.family,
        hidden_size=size,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=num_heads,
        norm_eps=1e-6,
        activation=ACTIVATIONS.get(known.activation, "silu"),
        image_size=0,
        patch_size=patch_size,
        scale_factor=factor,
        image_token_id=files.outer.integer("image_token_id", 0, files.vocab_size - 1, default=151_655),
        image_token=tokens.get("image_token", "<|image_pad|>"),
        begin_token=tokens.get("vision_bos_token", "<|vision_start|>"),
        end_token=tokens.get("vision_eos_token", "<|vision_end|>"),
        marker=tokens.get("image_token", "<|image_pad|>"),
        processing=_any_size(files.processor, patch_size * factor),
        num_positions=positions,
        window_size=window,
        whole_layers=_layer_ids(fields, "fullatt_block_indexes", known.whole, layers) if window else (),
        deepstack_layers=_layer_ids(fields, "deepstack_visual_indexes", known.deepstack, layers)
        if known.deepstack
        else (),
        rope_sections=sections,
        rope_alternates=alternates,
    )


def _sections(files: VisionFiles, known: _Qwen) -> tuple[tuple[int, ...], bool]:
    """How the pairs of rotated dimensions of the language model are divided among axes."""
    path, inner = files.outer.path, files.outer.get("text_config")
    text = Fields(path, inner, "text_config.") if isinstance(inner, Mapping) else files.outer
    name = text.given("rope_parameters", "rope_scaling")
    rope = text.get(name)
    fields = Fields(path, rope if isinstance(rope, Mapping) else {}, f"{name}.")
    sections = fields.integers("mrope_section", 0, 1 << 12) or known.sections
    alternates = fields.boolean("mrope_interleaved", default=known.alternates)
    if len(sections) != 3 or sum(sections) != files.num_turning or alternates != known.alternates:
        rule = f"expected three numbers with the sum {files.num_turning}, the pairs of a head that turn"
        if alternates != known.alternates:
            raise fields.error("mrope_interleaved", alternates, f"{known.family} has {known.alternates}")
        raise fields.error("mrope_section", list(sections), rule)
    return sections, alternates


def _layer_ids(fields: Fields, name: str, default: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    found = fields.integers(name, 0, num_layers - 1) if fields.get(name) is not None else default
    if list(found) != sorted(set(found)) or (found and found[-1] >= num_layers):
        raise fields.error(
            name, list(found), f"expected ascending numbers below {num_layers}, the layers of the tower"
        )
    return found


def _any_size(fields: Fields, multiple: int) -> ImageProcessing:
    """How an image becomes one tile in its ratio, as Qwen2-VL's processor in transformers does."""
    expect(fields, "do_resize", True)
    size = fields.get("size")
    sides = Fields(fields.path, size if isinstance(size, Mapping) else {}, "size.")
    least = sides.integer("shortest_edge", 1, 1 << 30, default=56 * 56)
    most = sides.integer("longest_edge", 1, 1 << 30, default=28 * 28 * 1280)
    least = fields.integer("min_pixels", 1, 1 << 30, default=least)
    most = fields.integer("max_pixels", 1, 1 << 30, default=most)
    if not multiple**2 <= most or least > most:
        raise fields.error("max_pixels", most, f"expected at least min_pixels, {least}, and {multiple**2}")
    return ImageProcessing(
        longest_edge=None,
        tile_size=multiple,
        splits=True,
        min_pixels=least,
        max_pixels=most,
        **values_of_pixels(fields, resample=3, **CLIP),
    )
