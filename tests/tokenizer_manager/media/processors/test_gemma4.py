"""Images of Gemma 4 against transformers' processors: pixels, positions of patches, texts."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest
from msgspec import structs
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

from engine.tokenizer_manager.media.decode import decode_image
from engine.tokenizer_manager.media.processors import gemma4

from ..image_files import MODES, file_of, picture
from .test_idefics3 import SIZES, processing

SIDE = 48
VISION: Any = SimpleNamespace(image_token="<|image|>", begin_token="<|image>", end_token="<image|>")


def _compare(image: PIL.Image.Image, content: PIL.Image.Image, budget: int = 70, resample: int = 3) -> None:
    """`image`: as it is decoded here; `content`: as transformers gets it."""
    theirs = Gemma4ImageProcessorPil(max_soft_tokens=budget, do_rescale=False, resample=resample)
    expected = theirs(images=[content], return_tensors="np")
    how = structs.replace(processing(0, SIDE, resample=resample), max_pixels=budget * SIDE**2)

    tile, rows, columns = gemma4.tiles_of(image, how, splits=True)

    assert tile.dtype == np.uint8 and tile.shape == (1, rows * SIDE, columns * SIDE, 3)
    assert rows * columns == expected["num_soft_tokens_per_image"][0] <= budget
    patches = tile[0].reshape(rows * 3, 16, columns * 3, 16, 3).transpose(0, 2, 1, 3, 4)
    num = rows * columns * 9
    assert np.array_equal(patches.reshape(num, -1), expected["pixel_values"][0, :num])
    places = expected["image_position_ids"][0]
    assert (places[num:] == -1).all() and places[:num].max(axis=0).tolist() == [columns * 3 - 1, rows * 3 - 1]
    text = gemma4.prompt_text(VISION, rows, columns)
    names = SimpleNamespace(image_token="<|image|>", boi_token="<|image>", eoi_token="<image|>")
    replace: Any = Gemma4Processor.replace_image_token  # a whole processor needs torchvision
    assert text == replace(names, expected, 0)


@pytest.mark.parametrize("budget", [70, pytest.param(280, marks=pytest.mark.slow)])
def test_pixels_are_those_of_transformers(budget: int) -> None:
    for number, size in enumerate(
        (*SIZES, (384, 384), (48, 48), (1, 400), (4000, 13), (3, 2000), (1000, 999))
    ):
        image = picture(*size, seed=number)
        _compare(image, image, budget, resample=1 + number % 3)


@pytest.mark.parametrize("name", MODES)
def test_images_of_all_modes_are_those_of_transformers(name: str) -> None:
    mode, kind, options = MODES[name]
    content = file_of(picture(61, 43, mode), kind, **options)
    _compare(decode_image(content, 10_000), PIL.Image.open(io.BytesIO(content)))


def test_small_copies_and_limits() -> None:
    image, how = picture(1200, 900), structs.replace(processing(0, SIDE), max_pixels=280 * SIDE**2)

    shapes = [gemma4.tiles_of(image, how, splits=splits)[0].shape for splits in (True, False)]
    least = structs.replace(how, min_pixels=200 * SIDE**2)
    tiny = structs.replace(how, max_pixels=SIDE**2)

    assert shapes == [(1, 14 * SIDE, 19 * SIDE, 3), (1, 9 * SIDE, 12 * SIDE, 3)]
    assert gemma4.tiles_of(image, least, splits=False)[1:] == (12, 16)
    for size in ((48, 48), (7, 5), (5, 7), (1, 900), (900, 1)):
        assert gemma4.tiles_of(picture(*size), tiny, splits=True)[1:] == (1, 1)


def test_special_tokens_of_texts_are_found() -> None:
    texts = ["<|image|>", "<|image>", "<image|>", "<|video|>", "<|audio|>"]
    assert re.findall(gemma4.special_texts(VISION), "a" + "b".join(texts) + "<image>") == texts
