"""Pixels of LLaVA and InternVL, and their texts, against transformers' processors."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest
from msgspec import structs
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from engine.tokenizer_manager.media.decode import BadImage, decode_image
from engine.tokenizer_manager.media.processors import internvl, llava

from ..image_files import MODES, file_of, picture
from .test_idefics3 import SIZES, processing

PLAIN: Any = {"do_rescale": False, "do_normalize": False}
CROPPED = structs.replace(processing(0, 24, resample=3), crops=True, longest_edge=None)
TILED = structs.replace(processing(0, 16, resample=3), min_tiles=1, max_tiles=6, longest_edge=None)


def of_transformers(processor: Any, image: PIL.Image.Image, **options: Any) -> Any:
    found = processor(images=[image], return_tensors="np", **options)
    return found["pixel_values"].transpose(0, 2, 3, 1)


def test_the_middle_is_that_of_clip() -> None:
    theirs = CLIPImageProcessorPil(size={"shortest_edge": 24}, crop_size={"height": 24, "width": 24}, **PLAIN)
    for number, size in enumerate(SIZES):
        image = picture(*size, seed=number)

        own = llava.tiles_of(image, CROPPED, splits=True)

        assert np.array_equal(own[0], of_transformers(theirs, image)), size
        assert own[1:] == (0, 0)


def test_a_whole_image_is_that_of_siglip() -> None:
    theirs = SiglipImageProcessorPil(size={"height": 24, "width": 24}, resample=3, **PLAIN)
    for number, size in enumerate(SIZES):
        image = picture(*size, seed=number)

        own, *_ = llava.tiles_of(image, structs.replace(CROPPED, crops=False), splits=True)

        assert np.array_equal(own, of_transformers(theirs, image)), size


def test_a_narrow_image_has_no_middle_of_a_bounded_size() -> None:
    whole, *_ = llava.tiles_of(PIL.Image.new("RGB", (1, 200)), CROPPED, splits=True)
    assert whole.shape == (1, 24, 24, 3)

    with pytest.raises(BadImage, match="has 201 x 1 pixels, but one side must not be more than 200 times"):
        llava.tiles_of(PIL.Image.new("RGB", (201, 1)), CROPPED, splits=True)


@pytest.mark.parametrize(("least", "most"), [(1, 6), (3, 12), (1, 2)])
def test_tiles_and_text_are_those_of_internvl(least: int, most: int) -> None:
    theirs = GotOcr2ImageProcessorPil(
        size={"height": 16, "width": 16}, min_patches=least, max_patches=most, **PLAIN
    )
    how: Any = structs.replace(TILED, min_tiles=least, max_tiles=most)
    vision: Any = SimpleNamespace(
        begin_token="<img>", end_token="</img>", image_token="<IMG_CONTEXT>", rows_per_tile=4
    )
    processor: Any = SimpleNamespace(
        start_image_token="<img>", end_image_token="</img>", image_token="<IMG_CONTEXT>", image_seq_length=4
    )
    for number, size in enumerate(SIZES):
        image = picture(*size, seed=number)
        expected = of_transformers(theirs, image, crop_to_patches=True)

        tiles, rows, columns = internvl.tiles_of(image, how, splits=True)

        assert np.array_equal(tiles, expected) and tiles.flags.c_contiguous, size
        text = InternVLProcessor.replace_image_token(processor, {"num_patches": [len(expected)]}, 0)
        assert internvl.prompt_text(vision, rows, columns) == text
        small, *grid = internvl.tiles_of(image, how, splits=False)
        assert np.array_equal(small, of_transformers(theirs, image)) and grid == [0, 0]


@pytest.mark.parametrize("name", MODES)
def test_images_of_all_modes(name: str) -> None:
    mode, kind, options = MODES[name]
    content = file_of(picture(61, 43, mode), kind, **options)
    image, theirs = decode_image(content, 10_000), PIL.Image.open(io.BytesIO(content))
    clip = CLIPImageProcessorPil(size={"shortest_edge": 24}, crop_size={"height": 24, "width": 24}, **PLAIN)
    tiled = GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, max_patches=6, **PLAIN)

    same = [
        np.array_equal(llava.tiles_of(image, CROPPED, splits=True)[0], of_transformers(clip, theirs)),
        np.array_equal(
            internvl.tiles_of(image, TILED, splits=True)[0],
            of_transformers(tiled, theirs, crop_to_patches=True),
        ),
    ]

    assert same == [True, True]
