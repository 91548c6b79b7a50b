from __future__ import annotations

import io

import numpy as np
import PIL.Image
import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from engine.models.spec.vision_spec import ImageProcessing
from engine.tokenizer_manager.media.decode import BadImage, decode_image
from engine.tokenizer_manager.media.processors.qwen2_vl import tiles_of

from ..image_files import MODES, file_of, picture
from .test_idefics3 import SIZES

BOUNDS = ((28 * 28 * 4, 28 * 28 * 64), (28 * 28, 28 * 28 * 9), (256 * 28 * 28, 1280 * 28 * 28))


def processing(least: int, most: int, side: int = 28, resample: int = 3) -> ImageProcessing:
    return ImageProcessing(
        longest_edge=None,
        tile_size=side,
        splits=True,
        resample=resample,
        rescale_factor=1.0,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        min_pixels=least,
        max_pixels=most,
    )


def _compare(content: bytes, least: int, most: int, side: int = 28, resample: int = 3) -> None:
    reference = Qwen2VLImageProcessorPil(
        size={"shortest_edge": least, "longest_edge": most},
        patch_size=side // 2,
        resample=resample,
        do_rescale=False,
        do_normalize=False,
    )
    expected = reference(images=[PIL.Image.open(io.BytesIO(content))], return_tensors="np")

    image = decode_image(content, 10_000_000)
    tiles, rows, columns = tiles_of(image, processing(least, most, side, resample), splits=True)

    assert expected["image_grid_thw"].tolist() == [[1, 2 * rows, 2 * columns]]
    assert tiles.shape == (1, rows * side, columns * side, 3) and tiles.dtype == np.uint8
    patches = tiles[0].reshape(rows, 2, side // 2, columns, 2, side // 2, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    frames = np.repeat(patches.reshape(-1, 3, 1, side * side // 4), 2, axis=2)
    assert np.array_equal(frames.reshape(len(frames), -1), expected["pixel_values"])


def test_images_of_all_sizes_are_those_of_transformers():
    for number, size in enumerate(SIZES):
        _compare(file_of(picture(*size, seed=number)), *BOUNDS[number % 2], resample=1 + number % 3)


@pytest.mark.slow
@pytest.mark.parametrize("side", [28, 32])
def test_images_of_published_bounds_are_those_of_transformers(side):
    for number, size in enumerate((*SIZES, (2000, 1333), (1025, 2049), (3000, 17))):
        _compare(file_of(picture(*size, seed=number)), *BOUNDS[2], side)


@pytest.mark.parametrize("name", MODES)
def test_images_of_all_modes_are_those_of_transformers(name):
    mode, kind, options = MODES[name]
    _compare(file_of(picture(61, 43, mode), kind, **options), *BOUNDS[0])


def test_a_strip_is_refused_and_low_detail_has_few_pixels():
    with pytest.raises(BadImage, match="201 x 1 pixels, but one side"):
        tiles_of(PIL.Image.new("RGB", (201, 1)), processing(*BOUNDS[2]), splits=True)
    large = PIL.Image.new("RGB", (2000, 1000))
    whole, rows, columns = tiles_of(large, processing(*BOUNDS[2]), splits=True)
    low, low_rows, low_columns = tiles_of(large, processing(*BOUNDS[0]), splits=False)
    assert whole.shape == (1, 28 * rows, 28 * columns, 3) and rows * columns <= 1280
    assert (
        low.shape == (1, 28 * low_rows, 28 * low_columns, 3) and low_rows * low_columns <= 512 * 512 // 28**2
    )
