"""Readers of `mmproj` files whose images keep their ratio: Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Mistral 3."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ..runtime.errors import ConfigError
from .fields import Fields
from .gguf_vision_fields import (
    BICUBIC,
    MAX_SIDE,
    PREFIX,
    QUICK_GELU,
    TowerFiles,
    tower_facts,
    values_of_pixels,
)
from .spec.model_spec import ModelSpec
from .spec.vision_spec import ImageProcessing, VisionSpec

_QWEN2_PIXELS: Final = (3_136, 12_845_056)
_QWEN3_PIXELS: Final = (65_536, 16_777_216)
"""Least and most pixels of an image, as the published processors of the models say."""
_WINDOW: Final = 112


def read_qwen2(files: TowerFiles) -> VisionSpec:
    """The tower of Qwen2-VL. The feed_forward_length in its files is another number, so the tensors say it."""
    return _qwen2(files, {QUICK_GELU: "quick_gelu"}, family="qwen2_vl")


def read_qwen2_5(files: TowerFiles) -> VisionSpec:
    """The tower of Qwen2.5-VL, every n-th layer of which attends to all of the image, the others to windows."""
    fields = files.tower
    num_layers = fields.integer(f"{PREFIX}block_count", 1, 1 << 12)
    every = fields.integer(f"{PREFIX}n_wa_pattern", 1, 1 << 12)
    return _qwen2(
        files,
        {"use_silu": "silu"},
        family="qwen2_5_vl",
        window_size=fields.integer(f"{PREFIX}window_size", 1, MAX_SIDE, default=_WINDOW),
        whole_layers=tuple(range(every - 1, num_layers, every)),
    )


def read_qwen3(files: TowerFiles) -> VisionSpec:
    """The tower of Qwen3-VL."""
    fields = files.tower
    facts = tower_facts(files, {"use_gelu": "gelu_tanh"})
    grid = fields.integer(f"{PREFIX}image_size", facts["patch_size"], MAX_SIDE) // facts["patch_size"]
    return _qwen(
        files,
        facts,
        ("qwen3vl", "qwen3vlmoe"),
        _QWEN3_PIXELS,
        family="qwen3_vl",
        num_positions=grid**2,
        deepstack_layers=_deepstack_layers(fields, facts["num_layers"]),
        rope_alternates=True,
    )


def read_pixtral(files: TowerFiles) -> VisionSpec:
    """The tower of Pixtral 12B, or with a merger of Mistral 3."""
    fields, image, row_end, end = files.tower, "[IMG]", "[IMG_BREAK]", "[IMG_END]"
    facts = tower_facts(files, {"use_silu": "silu", "use_gelu": "gelu"})
    _check_axes(fields, facts)
    factor = fields.integer(f"{PREFIX}spatial_merge_size", 1, 64, default=1)
    multiple = facts["patch_size"] * factor
    longest = fields.integer(f"{PREFIX}image_size", 1, MAX_SIDE)
    files.ids.check(row_end, end)
    return VisionSpec(
        family="pixtral",
        image_size=0,
        scale_factor=factor,
        has_mlp_bias="mm.1.bias" in files.tensors,
        image_token_id=files.ids.of(image),
        image_token=image,
        begin_token=row_end,
        end_token=end,
        marker=image,
        processing=ImageProcessing(
            longest_edge=longest,
            tile_size=multiple,
            splits=True,
            max_pixels=(-(-longest // multiple) * multiple) ** 2,
            **values_of_pixels(fields, BICUBIC),
        ),
        **facts,
    )


def _qwen2(files: TowerFiles, activations: dict[str, Any], **more: Any) -> VisionSpec:
    size = files.tower.integer(f"{PREFIX}embedding_length", 1, 1 << 20)
    up = files.tensors.get("v.blk.0.ffn_up.weight")
    if up is None or len(up.shape) != 2 or size not in up.shape:
        rule = f"has no matrix 'v.blk.0.ffn_up.weight' with {size} inputs"
        raise ConfigError(f"{files.tower.path}: {rule}; download it again")
    # Old files name the two layers of an MLP the other way round, see `GGUFFile.add_tower`.
    inner = up.shape[1] if up.shape[0] == size else up.shape[0]
    facts = tower_facts(files, activations, intermediate_size=inner)
    return _qwen(files, facts, ("qwen2vl",), _QWEN2_PIXELS, **more)


def _qwen(
    files: TowerFiles,
    facts: dict[str, Any],
    architectures: tuple[str, ...],
    pixels: tuple[int, int],
    **more: Any,
) -> VisionSpec:
    """The tower of one of Qwen's models.

    Args:
        facts: of `tower_facts`.
        architectures: names of its language models in GGUF files.
        pixels: the least and the most of an image, if the file does not say them.
        more: attributes of `VisionSpec`.
    """
    fields, ids = files.tower, files.ids
    architecture = files.text.text("general.architecture")
    if architecture not in architectures:
        rule = f"but the tower is one for {' and '.join(architectures)}; give both files of one model"
        raise files.text.error("general.architecture", architecture, rule)
    _check_axes(fields, facts)
    factor = fields.integer(f"{PREFIX}spatial_merge_size", 1, 64, default=2)
    multiple = facts["patch_size"] * factor
    least = fields.integer(f"{PREFIX}image_min_pixels", 1, 1 << 30, default=pixels[0])
    most = fields.integer(f"{PREFIX}image_max_pixels", least, 1 << 30, default=pixels[1])
    return VisionSpec(
        scale_factor=factor,
        image_size=0,
        image_token_id=ids.of("<|image_pad|>"),
        image_token="<|image_pad|>",
        begin_token="<|vision_start|>",
        end_token="<|vision_end|>",
        marker="<|image_pad|>",
        processing=ImageProcessing(
            longest_edge=None,
            tile_size=multiple,
            splits=True,
            min_pixels=least,
            max_pixels=max(most, multiple**2),
            **values_of_pixels(fields, BICUBIC),
        ),
        rope_sections=_rope_sections(files.text, files.spec),
        **facts | {"norm_eps": 1e-6} | more,
    )


def _check_axes(fields: Fields, facts: dict[str, Any]) -> None:
    """Check that a head has as many dimensions for rows as for columns."""
    size, num_heads = facts["hidden_size"], facts["num_heads"]
    if size % (4 * num_heads):
        rule = f"they cannot divide the embedding length {size} into multiples of 4"
        raise fields.error(f"{PREFIX}attention.head_count", num_heads, rule)


def _deepstack_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    name = f"{PREFIX}is_deepstack_layers"
    value = fields.get(name)
    if value is None:
        return ()
    if not isinstance(value, np.ndarray) or value.dtype.kind != "b" or value.shape != (num_layers,):
        raise fields.error(name, value, f"expected true or false for each of the {num_layers} layers")
    return tuple(np.flatnonzero(value).tolist())


def _rope_sections(fields: Fields, spec: ModelSpec) -> tuple[int, ...]:
    """How the pairs of rotated dimensions of the language model are divided among its three axes."""
    name = f"{fields.text('general.architecture')}.rope.dimension_sections"
    value, num_turning = fields.get(name), (spec.rotary_dim or spec.head_dim) // 2
    sections = value.tolist() if isinstance(value, np.ndarray) and value.dtype.kind in "iu" else []
    if len(sections) not in (3, 4) or sum(sections) != num_turning or any(sections[3:]):
        rule = f"expected three numbers with the sum {num_turning}, the pairs of a head that turn, and a 0"
        raise fields.error(name, value, f"{rule}; convert the model again")
    return tuple(sections[:3])
