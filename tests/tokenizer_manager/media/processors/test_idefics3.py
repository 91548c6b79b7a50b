from __future__ import annotations

import hashlib

import numpy as np
import pytest
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from engine.models.spec.vision_spec import ImageProcessing
from engine.tokenizer_manager.media.processors.idefics3 import tiles_of

from ..image_files import MODES, picture

SIZES = (
    *(
        (1, 1),
        (1, 50),
        (33, 17),
        (64, 48),
        (48, 65),
        (32, 32),
        (33, 32),
        (16, 16),
        (500, 3),
        (3, 500),
        (97, 89),
    ),
    *((640, 480), (481, 641), (255, 256)),
)


def processing(longest_edge: int, tile_size: int, resample: int = 1) -> ImageProcessing:
    return ImageProcessing(
        longest_edge=longest_edge,
        tile_size=tile_size,
        splits=True,
        resample=resample,
        rescale_factor=1.0,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
    )


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize(("longest_edge", "tile_size"), [(64, 16), (100, 24), (56, 14), (32, 32)])
def test_tiles_are_those_of_transformers(longest_edge, tile_size, splits):
    for number, size in enumerate(SIZES):
        _compare(picture(*size, seed=number), longest_edge, tile_size, splits, resample=1 + number % 3)


@pytest.mark.slow
@pytest.mark.parametrize(("longest_edge", "tile_size"), [(2048, 512), (1456, 364), (1536, 512)])
def test_tiles_of_published_sizes_are_those_of_transformers(longest_edge, tile_size):
    for number, size in enumerate((*SIZES, (2000, 1333), (1025, 2049), (5000, 700))):
        _compare(picture(*size, seed=number), longest_edge, tile_size, splits=True, resample=1)


@pytest.mark.parametrize("name", MODES)
def test_images_of_all_modes_are_those_of_transformers(name):
    import io

    import PIL.Image

    from engine.tokenizer_manager.media.decode import decode_image

    from ..image_files import file_of

    mode, kind, options = MODES[name]
    content = file_of(picture(61, 43, mode), kind, **options)
    own, _, _ = tiles_of(decode_image(content, 10_000), processing(64, 16), splits=True)

    expected = _reference(64, 16, True, 1)(
        images=[[PIL.Image.open(io.BytesIO(content))]], return_tensors="np"
    )

    assert np.array_equal(own, expected["pixel_values"][0].transpose(0, 2, 3, 1))


def test_pixels_do_not_change():
    """A golden value, which shows a change of Pillow's filters."""
    tiles, rows, columns = tiles_of(picture(123, 77), processing(64, 16), splits=True)

    assert (tiles.shape, rows, columns) == ((13, 16, 16, 3), 3, 4)
    assert hashlib.sha256(tiles.tobytes()).hexdigest()[:16] == "9f95b31e47003e56"


def _reference(longest_edge, tile_size, splits, resample):
    return Idefics3ImageProcessorPil(
        size={"longest_edge": longest_edge},
        max_image_size={"longest_edge": tile_size},
        do_image_splitting=splits,
        resample=resample,
        do_rescale=False,
        do_normalize=False,
        return_row_col_info=True,
    )


def _compare(image, longest_edge, tile_size, splits, resample):
    expected = _reference(longest_edge, tile_size, splits, resample)(images=[[image]], return_tensors="np")

    tiles, rows, columns = tiles_of(image, processing(longest_edge, tile_size, resample), splits=splits)

    assert np.array_equal(tiles, expected["pixel_values"][0].transpose(0, 2, 3, 1)), image.size
    assert (rows, columns) == (expected["rows"][0][0], expected["cols"][0][0])
    assert expected["pixel_attention_mask"].all(), "tiles have no padding"
