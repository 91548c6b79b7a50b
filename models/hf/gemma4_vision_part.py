"""`read_gemma4`, `read_gemma4_unified`: how Gemma 4 sees images, from its folders: by a tower, or by one product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..fields import Fields
from ..spec.vision_spec import ImageProcessing, VisionSpec
from .vision_fields import TEXT_ONLY, VisionFiles, expect, expect_theta, tower_facts, values_of_pixels

_ROWS: Final = (70, 140, 280, 560, 1120)
"""Rows of an image, at most, among which transformers' processor lets choose."""
_PLAIN: Final[dict[str, Any]] = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


def read_gemma4(files: VisionFiles) -> VisionSpec:
    """A tower for images of any size, the mean of each 3 x 3 patches of which becomes a row."""
    inner = files.inner
    facts = tower_facts(inner, hidden_size=768, num_heads=12, patch_size=16, num_layers=16)
    size, num_heads, side = facts["hidden_size"], facts["num_heads"], facts["patch_size"]
    if size % (4 * num_heads):
        rule = f"they cannot divide the hidden size {size} into multiples of 4"
        raise inner.error("num_attention_heads", num_heads, rule)
    for name, value in (("hidden_activation", "gelu_pytorch_tanh"), ("attention_bias", False)):
        expect(inner, name, value)
    for name, default, number in (
        ("head_dim", 64, size // num_heads),
        ("num_key_value_heads", 12, num_heads),
    ):
        if inner.integer(name, 1, 1 << 12, default=default) != number:
            raise inner.error(name, inner.get(name), f"expected {number}, {TEXT_ONLY}")
    expect_theta(inner, 100.0)
    facts |= {"norm_eps": inner.number("rms_norm_eps", 1e-30, 1.0, default=1e-6), "image_size": 0}
    factor = inner.integer("pooling_kernel_size", 1, 64, default=3)
    text = _text(files)
    return VisionSpec(
        family="gemma4",
        scale_factor=factor,
        num_positions=inner.integer(
            "position_embedding_size", _rows(files) * factor, 1 << 20, default=10_240
        ),
        clips=inner.boolean("use_clipped_linears", default=False),
        standardizes=inner.boolean("standardize", default=False),
        layer_input_id=text.integer("pad_token_id", 0, files.vocab_size - 1, default=0),
        **_common(files, side, factor, whole=text.get("use_bidirectional_attention")),
        **facts,
    )


def read_gemma4_unified(files: VisionFiles) -> VisionSpec:
    """One product without a tower: each square of 48 x 48 pixels becomes a row."""
    inner = files.inner
    side = inner.integer("patch_size", 1, 1 << 12, default=16)
    factor = inner.integer("pooling_kernel_size", 1, 64, default=3)
    size = inner.integer("mm_embed_dim", 1, 1 << 20, default=3840)
    if inner.integer("output_proj_dims", 1, 1 << 20, default=3840) != size:
        raise inner.error("output_proj_dims", inner.get("output_proj_dims"), f"expected mm_embed_dim, {size}")
    text, name = _text(files), "use_bidirectional_attention"
    return VisionSpec(
        family="gemma4_unified",
        hidden_size=size,
        intermediate_size=size,
        num_layers=0,
        num_heads=1,
        norm_eps=inner.number("rms_norm_eps", 1e-30, 1.0, default=1e-6),
        activation="gelu_tanh",
        image_size=0,
        patch_size=side * factor,
        scale_factor=1,
        num_positions=inner.integer("mm_posemb_size", _rows(files), 1 << 20, default=1120),
        **_common(files, side, factor, whole=text.get(name) if name in text else "vision"),
    )


def _text(files: VisionFiles) -> Fields:
    """The fields of the language model."""
    found = files.outer.get("text_config")
    return Fields(files.outer.path, found if isinstance(found, Mapping) else {}, "text_config.")


def _rows(files: VisionFiles) -> int:
    """The most rows of an image."""
    name = "max_soft_tokens"
    rows = files.processor.integer(name, 1, 1 << 16, default=280)
    if rows not in _ROWS:
        rule = f"expected one of {', '.join(map(str, _ROWS))}, {TEXT_ONLY}"
        raise files.processor.error(name, rows, rule)
    return rows


def _common(files: VisionFiles, side: int, factor: int, *, whole: object) -> dict[str, Any]:
    """The tokens, and how an image becomes one tile.

    Args:
        side: of a patch, in pixels.
        factor: patches of a row in each direction.
        whole: `use_bidirectional_attention` of the language model.
    """
    processor, tokens = files.processor, files.tokens
    for name, value in (("do_resize", True), ("patch_size", side), ("pooling_kernel_size", factor)):
        expect(processor, name, value)
    values = values_of_pixels(processor, resample=3, **_PLAIN)
    if not processor.boolean("do_normalize", default=False):
        values |= _PLAIN
    image = tokens.get("image_token", "<|image|>")
    return {
        "sees_whole": whole == "vision",
        "only_in_windows": whole == "vision",
        "image_token_id": files.outer.integer("image_token_id", 0, files.vocab_size - 1, default=258_880),
        "image_token": image,
        "begin_token": tokens.get("boi_token", "<|image>"),
        "end_token": tokens.get("eoi_token", "<image|>"),
        "marker": image,
        "processing": ImageProcessing(
            longest_edge=None,
            tile_size=side * factor,
            splits=True,
            max_pixels=_rows(files) * (side * factor) ** 2,
            **values,
        ),
    }
