"""Settings of images: how many rows stay computed, and how large images are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from engine.launch.resolve.image_limits import part_scale, with_image_limits
from engine.launch.resolve.memory_budget import capacity_of
from engine.launch.resolve.prepare import prepare
from engine.launch.resolve.resolve import resolve
from engine.models.spec.vision_spec import ImageProcessing, VisionSpec
from engine.runtime.config.config_sources import from_arguments, merge
from engine.runtime.config.device_config import ParallelConfig
from engine.runtime.errors import ConfigError
from tests.models.hf.test_vision_part import QWEN, QWEN_PROCESSOR, QWEN_TOWER

from .test_resolve import HOST, SPEC, config, pool_of

HALF = (0.5, 0.5, 0.5)
PROCESSING = ImageProcessing(
    longest_edge=2048, tile_size=512, splits=True, resample=1, rescale_factor=1 / 255, mean=HALF, std=HALF
)
VISION = VisionSpec(
    family="idefics3",
    hidden_size=768,
    intermediate_size=3072,
    num_layers=12,
    num_heads=12,
    norm_eps=1e-6,
    activation="gelu_tanh",
    image_size=512,
    patch_size=16,
    scale_factor=4,
    image_token_id=7,
    image_token="<image>",
    begin_token="<fake>",
    end_token="<fake>",
    marker="<image>",
    processing=PROCESSING,
)
SEEING = msgspec.structs.replace(SPEC, vision=VISION)


def test_auto_holds_eight_of_the_largest_images() -> None:
    resolved = resolve(config(), SEEING, HOST)
    capacity = capacity_of(resolved.config, SEEING)

    assert VISION.most_tiles == 17
    assert (capacity.num_encoder_rows, capacity.encoder_tile_rows) == (8 * 17 * 64, 64)
    assert resolved.notes["mm_encoder_cache_tokens"] == "8 of the largest images"
    text = capacity_of(resolve(config(), SPEC, HOST).config, SPEC)
    assert (text.num_encoder_rows, text.encoder_tile_rows) == (0, 0)


def test_ranks_on_other_machines_get_no_images() -> None:
    """They cannot read the files with the pixels."""
    resolved = resolve(config(), SEEING, HOST).config
    parallel = ParallelConfig(tp=2, nnodes=2, dist_init_addr="10.0.0.1:5000")

    assert capacity_of(replace(resolved, parallel=parallel), SEEING).num_encoder_rows == 0


def test_what_the_user_asks_for_is_in_whole_tiles() -> None:
    resolved = resolve(config(mm_encoder_cache_tokens=200), SEEING, HOST)

    assert capacity_of(resolved.config, SEEING).num_encoder_rows == 192
    assert resolved.notes["mm_encoder_cache_tokens"] == "200 in whole tiles of 64"


def test_rows_and_tower_take_memory_from_the_pool() -> None:
    # With so many positions memory is the only bound of the pool.
    spec = msgspec.structs.replace(SEEING, max_position_embeddings=1 << 20)
    settings = {"max_model_len": 1 << 17, "mem_fraction": 0.4}
    few, many = (
        pool_of(resolve(config(mm_encoder_cache_tokens=n, **settings), spec, HOST).config)
        for n in (64, 64_064)
    )
    text = pool_of(resolve(config(**settings), msgspec.structs.replace(spec, vision=None), HOST).config)

    rows = 64_000 * SPEC.hidden_size * 2
    assert 0.5 * 0.4 * rows < (few - many) * SPEC.kv_bytes_per_token(2) < 0.4 * rows
    assert text > few


@pytest.mark.parametrize(
    ("spec", "asked", "message"),
    [
        (SPEC, 64, "mm_encoder_cache_tokens is 64, but the model sees no images; omit"),
        (SEEING, 63, "is 63, but a tile of an image takes 64; raise .*--language-model-only"),
    ],
)
def test_what_is_refused(spec, asked, message) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(config(mm_encoder_cache_tokens=asked), spec, HOST)


@pytest.mark.parametrize(
    ("flags", "dtype", "threads", "tiles", "side"),
    [
        ({"avx512_bf16"}, "bfloat16", 2, 3, None),
        ({"avx512_bf16"}, "bfloat16", 8, 14, 3),
        ({"avx512_bf16", "amx_bf16"}, "bfloat16", 8, 17, 4),
        ({"avx2"}, "float32", 2, 1, None),
    ],
)
def test_a_cpu_sees_as_many_tiles_as_two_seconds_allow(flags, dtype, threads, tiles, side) -> None:
    host = replace(HOST, cpu_flags=frozenset(flags))
    resolved = resolve(config(dtype=dtype, num_threads=threads), SEEING, host)
    vision = with_image_limits(SEEING, resolved.config.media).vision

    assert resolved.config.media.mm_max_pixels == tiles * 512**2 and resolved.config.media.mm_detail == "low"
    assert vision is not None and vision.processing.splits is (side is not None)
    assert vision.most_tiles == (1 if side is None else side**2 + 1)
    assert side is None or vision.processing.longest_edge == side * 512
    assert resolve(resolved.config, SEEING, host).config == resolved.config


def test_limits_that_the_user_gives_hold() -> None:
    resolved = resolve(config(mm_max_pixels=5 * 512**2, mm_detail="high"), SEEING, HOST)

    vision = with_image_limits(SEEING, resolved.config.media).vision
    assert resolved.config.media.mm_detail == "high" and vision is not None and vision.most_tiles == 5
    assert with_image_limits(SPEC, resolve(config(), SPEC, HOST).config.media) is SPEC
    with pytest.raises(ConfigError, match="mm_max_pixels is 5, but the model sees no images"):
        resolve(config(mm_max_pixels=5), SPEC, HOST)


def test_a_small_model_sees_all_of_an_image() -> None:
    tiny = msgspec.structs.replace(SEEING, vision=msgspec.structs.replace(VISION, num_layers=1))

    resolved = resolve(config(num_threads=2), tiny, replace(HOST, cpu_flags=frozenset({"avx512_bf16"})))

    assert resolved.config.media.mm_max_pixels == VISION.most_pixels
    assert resolved.notes["mm_max_pixels"] == "the largest image of the model's processor"


ANY_SIZE = msgspec.structs.replace(
    VISION,
    family="qwen2_5_vl",
    image_size=0,
    patch_size=14,
    scale_factor=2,
    window_size=112,
    whole_layers=(11,),
    rope_sections=(16, 24, 24),
    processing=msgspec.structs.replace(
        PROCESSING, longest_edge=None, tile_size=28, min_pixels=3136, max_pixels=12_845_056
    ),
)
"""A small tower of Qwen2.5-VL with the published bounds."""


def test_images_of_any_size_have_as_many_pixels_as_two_seconds_allow() -> None:
    spec = msgspec.structs.replace(SEEING, vision=ANY_SIZE)
    host = replace(HOST, cpu_flags=frozenset({"avx512_bf16"}))
    resolved = resolve(config(num_threads=2), spec, host)
    limited = with_image_limits(spec, resolved.config.media)
    pixels, vision = resolved.config.media.mm_max_pixels, limited.vision

    assert pixels != "auto" and vision is not None and vision.processing.max_pixels == pixels
    seconds = ANY_SIZE.flops_per_tile(SPEC.hidden_size) / (2 * 1.9e11) * pixels / (1 << 20)
    assert pixels % 28**2 == 0 and 1.9 < seconds <= 2.0
    assert "one of 1,048,576 pixels takes about" in resolved.notes["mm_max_pixels"]
    assert resolved.notes["mm_detail"] == "512 x 512 pixels an image on a CPU"
    capacity = capacity_of(resolved.config, limited)
    assert (capacity.encoder_row_pixels, capacity.encoder_tile_rows, capacity.has_rope_axes) == (28, 64, True)
    assert capacity.encoder_tile_parts == 4 * vision.num_layers, "of each block of 256 patches"
    assert vision.most_rows <= capacity.num_encoder_rows <= max(16_384, vision.most_rows)
    assert resolve(resolved.config, limited, host).config == resolved.config


@pytest.mark.parametrize(
    ("device", "num_threads", "scale"), [("cpu", 2, 1), ("cpu", 8, 2), ("cpu", 64, 4), ("cuda", 2, 4)]
)
def test_parts_have_more_patches_with_many_cores(device: str, num_threads: int, scale: int) -> None:
    assert part_scale(device, num_threads) == scale
    media = resolve(config(), SEEING, HOST).config.media
    vision = with_image_limits(msgspec.structs.replace(SEEING, vision=ANY_SIZE), media, scale).vision
    assert vision is not None and vision.rows_per_tile == scale * 64
    fixed = with_image_limits(SEEING, media, scale).vision
    assert fixed is not None
    assert fixed.num_parts == 4 * fixed.num_layers * -(-(fixed.grid**2) // (256 * scale))


@pytest.mark.parametrize("num_threads", [2, 8])
def test_scheduler_and_tower_count_the_same_parts(tmp_path: Path, num_threads: int) -> None:
    """The spec that the runner gets has the blocks for which the rows of the cache were decided."""
    tower = QWEN_TOWER | {"depth": 2, "fullatt_block_indexes": [1]}
    fields = QWEN | {"vision_config": tower}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(QWEN_PROCESSOR))
    settings = {"model": tmp_path, "load_format": "dummy", "num_threads": num_threads, "device": "cpu"}
    prepared = prepare(merge(from_arguments(settings)), host=HOST)
    capacity, vision = capacity_of(prepared.config, prepared.spec), prepared.spec.vision

    assert vision is not None and vision.part_scale == {2: 1, 8: 2}[num_threads]
    assert capacity.encoder_tile_rows == vision.rows_per_tile == 64 * vision.part_scale
    assert capacity.num_encoder_rows % capacity.encoder_tile_rows == 0
    assert capacity.num_encoder_rows >= vision.most_rows


@pytest.mark.parametrize(("asked", "rows"), [(1, 64), (64, 64), (1300, 1344)])
def test_the_encoder_cache_holds_whole_blocks_of_rows(asked: int, rows: int) -> None:
    resolved = resolve(
        config(num_threads=2, mm_encoder_cache_tokens=asked),
        msgspec.structs.replace(SEEING, vision=ANY_SIZE),
        HOST,
    )
    assert resolved.config.cache.mm_encoder_cache_tokens == rows
    assert asked == rows or "in whole blocks of 64" in resolved.notes["mm_encoder_cache_tokens"]


def test_the_least_pixels_of_images_of_any_size() -> None:
    spec = msgspec.structs.replace(SEEING, vision=ANY_SIZE)
    for least, most in ((784, 1_003_520), (10_000_000, "auto")):
        resolved = resolve(config(mm_min_pixels=least, mm_max_pixels=most), spec, HOST)
        vision = with_image_limits(spec, resolved.config.media).vision

        assert vision is not None and vision.processing.min_pixels == least <= vision.processing.max_pixels
        assert most in ("auto", vision.processing.max_pixels)
    for refusing, asked, message in (
        (spec, 20_000_000, "makes images of at most 12845056 pixels"),
        (SEEING, 784, "have one size; omit --mm-min-pixels"),
        (SPEC, 784, "mm_min_pixels is 784, but the model sees no images"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolve(config(mm_min_pixels=asked), refusing, HOST)


def test_rows_of_several_layers_take_memory_from_the_pool() -> None:
    def pool(*layers: int) -> int:
        vision = msgspec.structs.replace(ANY_SIZE, deepstack_layers=layers)
        spec = msgspec.structs.replace(SEEING, max_position_embeddings=1 << 20, vision=vision)
        settings = {"mm_encoder_cache_tokens": 64_000, "max_model_len": 1 << 17, "mem_fraction": 0.4}
        return pool_of(resolve(config(**settings), spec, HOST).config)

    rows, joined = 3 * 64_000 * SPEC.hidden_size * 2, ANY_SIZE.joined_size
    connectors = 3 * (joined + SPEC.hidden_size) * joined * 2
    taken = (pool() - pool(1, 2, 3)) * SPEC.kv_bytes_per_token(2)
    assert 0.4 * rows < taken < 0.4 * (rows + connectors) * 1.01
