"""Pixels of Mistral 3 against transformers' processor; its text, whose class needs torchvision, is written out."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest
from msgspec import structs
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from engine.tokenizer_manager.media.decode import BadImage, decode_image
from engine.tokenizer_manager.media.processors import pixtral

from ..image_files import MODES, file_of, picture
from .test_idefics3 import SIZES, processing

PLAIN: Any = {"do_rescale": False, "do_normalize": False, "patch_size": {"height": 14, "width": 14}}
THEIRS = PixtralImageProcessorPil(size={"longest_edge": 224}, **PLAIN)
HOW = structs.replace(processing(224, 14, resample=3), max_pixels=224 * 224)


@pytest.mark.parametrize("size", [*SIZES, (224, 224), (225, 1), (13, 4000), (1000, 999)])
def test_pixels_are_those_of_transformers(size: tuple[int, int]) -> None:
    image = picture(*size)
    if max(size) > 224 * min(size):  # transformers fails for such sizes
        with pytest.raises(BadImage, match="nothing is left when its longer side is 224; cut it"):
            pixtral.tiles_of(image, HOW, splits=True)
        return
    expected = THEIRS(images=[image], return_tensors="np")
    vision: Any = SimpleNamespace(image_token="[IMG]", begin_token="[IMG_BREAK]", end_token="[IMG_END]")

    tile, rows, columns = pixtral.tiles_of(image, HOW, splits=True)

    assert np.array_equal(tile, expected["pixel_values"].transpose(0, 2, 3, 1))
    height, width = (int(side) // 14 for side in expected["image_sizes"][0])
    assert (rows, columns) == (height, width)
    text = [*(["[IMG]"] * width + ["[IMG_BREAK]"]) * height]
    assert pixtral.prompt_text(vision, rows, columns) == "".join([*text[:-1], "[IMG_END]"])


@pytest.mark.parametrize("name", MODES)
def test_images_of_all_modes_are_those_of_transformers(name: str) -> None:
    mode, kind, options = MODES[name]
    content = file_of(picture(61, 43, mode), kind, **options)

    tile, *_ = pixtral.tiles_of(decode_image(content, 10_000), HOW, splits=True)

    expected = THEIRS(images=[PIL.Image.open(io.BytesIO(content))], return_tensors="np")["pixel_values"]
    assert np.array_equal(tile, expected.transpose(0, 2, 3, 1))


def test_limits_are_those_of_a_smaller_longest_edge() -> None:
    image = picture(1200, 900)
    smaller = structs.replace(HOW, longest_edge=112)
    large = structs.replace(HOW, longest_edge=1540, max_pixels=1540**2)

    limited, *_ = pixtral.tiles_of(image, structs.replace(HOW, max_pixels=112 * 125), splits=True)
    low, *_ = pixtral.tiles_of(image, large, splits=False)

    assert np.array_equal(limited, pixtral.tiles_of(image, smaller, splits=True)[0])
    assert low.shape == (1, 378, 504, 3)
