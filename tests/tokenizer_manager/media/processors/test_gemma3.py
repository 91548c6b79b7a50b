from __future__ import annotations

import io

import numpy as np
import PIL.Image
import pytest
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from engine.models.spec.vision_spec import ImageProcessing
from engine.tokenizer_manager.media.decode import decode_image
from engine.tokenizer_manager.media.processors.gemma3 import tiles_of

from ..image_files import MODES, file_of, picture
from .test_idefics3 import SIZES


def _compare(content: bytes, side: int, resample: int) -> None:
    reference = Gemma3ImageProcessorPil(
        size={"height": side, "width": side}, resample=resample, do_rescale=False, do_normalize=False
    )
    expected = reference(images=[PIL.Image.open(io.BytesIO(content))], return_tensors="np")
    processing = ImageProcessing(
        longest_edge=None,
        tile_size=side,
        splits=False,
        resample=resample,
        rescale_factor=1.0,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
    )

    tiles, rows, columns = tiles_of(decode_image(content, 10_000_000), processing, splits=False)

    assert np.array_equal(tiles, expected["pixel_values"].transpose(0, 2, 3, 1))
    assert tiles.dtype == np.uint8 and (rows, columns) == (0, 0)


def test_images_of_all_sizes_are_those_of_transformers():
    for number, size in enumerate(SIZES):
        for side in (16, 24, 65):
            _compare(file_of(picture(*size, seed=number)), side, resample=1 + number % 3)


@pytest.mark.parametrize("name", MODES)
def test_images_of_all_modes_are_those_of_transformers(name):
    mode, kind, options = MODES[name]
    _compare(file_of(picture(61, 43, mode), kind, **options), 24, resample=2)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(2000, 1333), (1025, 2049), (896, 896), (3, 500)])
def test_images_of_the_published_size_are_those_of_transformers(size):
    _compare(file_of(picture(*size)), 896, resample=2)
