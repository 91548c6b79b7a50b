"""`image_limits`: how many pixels of an image the tower sees on this machine, and how detailed images are by default.

A tower's work grows with the tiles of an image, and on a CPU a large image takes tens of seconds, which looks like a
hang. So the limit there is the number of tiles that two seconds allow, at least one, and an image whose request states
no detail is one tile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from ...runtime.config.media_config import MediaConfig
from ...runtime.errors import ConfigError

if TYPE_CHECKING:
    from ...models.spec.model_spec import ModelSpec

IMAGE_S: Final = 2.0
"""Time for an image on a CPU."""
_FLOPS: Final = (
    ("amx_bf16", 4e11),
    ("avx512_bf16", 1.9e11),  # of Zen 4, as measured
    ("bf16", 8e10),  # ARM
)
"""Operations per second of a thread in bfloat16 products, by the first flag that a CPU has."""
_FLOAT32_FLOPS: Final = (("avx512f", 8e10), ("", 4e10))  # the last one of AVX2, as measured
_THREADS_OF_PART: Final = 4
_MOST_SCALE: Final = (
    4  # 1,024 patches: more would be as fast, and an image's rows would take whole blocks of as many
)


def image_limits(
    media: MediaConfig,
    spec: ModelSpec,
    *,
    device: str,
    dtype: str,
    num_threads: int,
    cpu_flags: Collection[str],
) -> tuple[MediaConfig, Mapping[str, str]]:
    """The settings without "auto", and setting -> reason for each that was filled in.

    Raises:
        ConfigError: there are limits, but the model sees no images.
    """
    vision, pixels, detail = spec.vision, media.mm_max_pixels, media.mm_detail
    if vision is None:
        for name, value in (("max", pixels), ("min", media.mm_min_pixels)):
            if value not in ("auto", 0):
                raise ConfigError(
                    f"mm_{name}_pixels is {value}, but the model sees no images; omit --mm-{name}-pixels"
                )
        return dataclasses.replace(media, mm_max_pixels=0, mm_detail="high"), {}
    notes, least = {}, media.mm_min_pixels
    if least and not vision.row_pixels:
        raise ConfigError(
            f"mm_min_pixels is {least}, but the tiles of this model's images have one size; omit --mm-min-pixels"
        )
    if least > vision.most_pixels:
        raise ConfigError(
            f"mm_min_pixels is {least}, but the model's processor makes images of at most {vision.most_pixels} pixels; "
            "lower --mm-min-pixels"
        )
    if pixels == "auto":
        pixels, notes["mm_max_pixels"] = vision.most_pixels, "the largest image of the model's processor"
        tile_s = vision.flops_per_tile(spec.hidden_size) / (num_threads * _flops(dtype, cpu_flags))
        unit = vision.processing.tile_size**2
        allowed = max(1, int(IMAGE_S / tile_s * vision.shown_pixels / unit)) * unit
        allowed = max(allowed, least)  # what the user asks for
        if device == "cpu" and allowed < pixels:
            pixels = allowed
            what = f"one of {vision.shown_pixels:,} pixels" if vision.row_pixels else "a tile"
            notes["mm_max_pixels"] = f"{IMAGE_S:g} s an image: {what} takes about {tile_s:.2g} s on this CPU"
    if detail == "auto":
        detail = "low" if device == "cpu" else "high"
        low = "512 x 512 pixels" if vision.row_pixels else "one tile"
        notes["mm_detail"] = f"{low} an image on a CPU" if device == "cpu" else "as the model's processor"
    return dataclasses.replace(media, mm_max_pixels=pixels, mm_detail=detail), notes


def with_image_limits(spec: ModelSpec, media: MediaConfig, part_scale: int = 1) -> ModelSpec:
    """The model with images as large as the settings, which are resolved, allow; `part_scale`: see `VisionSpec`."""
    if spec.vision is None or media.mm_max_pixels == "auto":
        return spec
    vision = spec.vision.limited(media.mm_max_pixels, media.mm_min_pixels)
    return replace(spec, vision=replace(vision, part_scale=part_scale))


def part_scale(device: str, num_threads: int) -> int:
    """`VisionSpec.part_scale`: a part keeps all threads busy, and the more there are the less time it takes."""
    return _MOST_SCALE if device != "cpu" else min(max(1, num_threads // _THREADS_OF_PART), _MOST_SCALE)


def _flops(dtype: str, cpu_flags: Collection[str]) -> float:
    table = (*_FLOPS, *_FLOAT32_FLOPS) if dtype == "bfloat16" else _FLOAT32_FLOPS
    return next(flops for flag, flops in table if not flag or flag in cpu_flags)
