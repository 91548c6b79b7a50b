"""Pixels of LLaVA-NeXT and the numbers of its placeholders, against transformers' processors."""

from __future__ import annotations

import io
from array import array
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest
from msgspec import structs
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

from engine.runtime.media import runs_of
from engine.tokenizer_manager.media.decode import decode_image
from engine.tokenizer_manager.media.placement import ImagePlacement
from engine.tokenizer_manager.media.processors import llava_next
from engine.tokenizer_manager.media.worker import PreparedImage, PrepareImage, prepare

from ...fake_engine import make_tokenizer
from ..image_files import MODES, file_of, picture
from ..test_image_store import VISION
from .test_idefics3 import SIZES, processing

SIDE, PATCH = 24, 6
GRIDS = (((24, 48), (48, 24), (48, 48), (72, 24), (24, 72)), ((48, 48), (24, 96)))
HOW = structs.replace(processing(0, SIDE, resample=3), longest_edge=None)


def theirs(pinpoints: Any) -> LlavaNextImageProcessorPil:
    return LlavaNextImageProcessorPil(
        size={"shortest_edge": SIDE},
        crop_size={"height": SIDE, "width": SIDE},
        image_grid_pinpoints=[list(each) for each in pinpoints],
        do_rescale=False,
        do_normalize=False,
    )


@pytest.mark.parametrize("pinpoints", GRIDS)
def test_tiles_and_text_are_those_of_transformers(pinpoints: Any) -> None:
    how = structs.replace(HOW, pinpoints=pinpoints)
    vision: Any = SimpleNamespace(image_token="<image>", rows_per_tile=17, grid=4, processing=how)
    processor: Any = SimpleNamespace(
        image_processor=theirs(pinpoints),
        patch_size=PATCH,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
        image_token="<image>",
        _get_unpadded_features=lambda *sizes: LlavaNextProcessor._get_unpadded_features(processor, *sizes),
        _get_number_of_features=lambda *sizes: LlavaNextProcessor._get_number_of_features(processor, *sizes),
    )
    for number, size in enumerate((*SIZES, (24, 24), (48, 24), (49, 24), (7, 100))):
        image = picture(*size, seed=number)
        expected = processor.image_processor(images=[image], return_tensors="np")

        tiles, rows, columns = llava_next.tiles_of(image, how, splits=True)

        assert np.array_equal(tiles, expected["pixel_values"][0].transpose(0, 2, 3, 1)), size
        assert [rows, columns] == expected["image_sizes"][0].tolist() and tiles.flags.c_contiguous
        text = LlavaNextProcessor.replace_image_token(processor, expected, 0)
        assert llava_next.prompt_text(vision, rows, columns) == text, size


def test_a_small_copy_alone() -> None:
    how = structs.replace(HOW, pinpoints=GRIDS[0])
    vision: Any = SimpleNamespace(image_token="<image>", rows_per_tile=17, grid=4, processing=how)
    image = picture(100, 37)

    small = llava_next.tiles_of(image, how, splits=False)
    limited = llava_next.tiles_of(image, structs.replace(how, splits=False), splits=True)

    assert small[1:] == limited[1:] == (0, 0)
    assert np.array_equal(small[0], llava_next.tiles_of(image, how, splits=True)[0][:1])
    assert llava_next.rows_of(vision, 0, 0) == [(0, 17)]
    beside = [[(17 + 4 * row, 4), (34 + 4 * row, 4), (50, 1)] for row in range(4)]
    assert llava_next.rows_of(vision, 24, 48) == [(0, 16), *chain(*beside)]
    narrow = [[(17 + 4 * row + 1, 2), (33, 1)] for row in range(4)]
    assert llava_next.rows_of(vision, 48, 12)[:9] == [(0, 16), *chain(*narrow)]


@pytest.mark.parametrize("name", MODES)
def test_images_of_all_modes(name: str) -> None:
    mode, kind, options = MODES[name]
    content = file_of(picture(61, 43, mode), kind, **options)

    tiles, *_ = llava_next.tiles_of(
        decode_image(content, 10_000), structs.replace(HOW, pinpoints=GRIDS[0]), splits=True
    )

    expected = theirs(GRIDS[0])(images=[PIL.Image.open(io.BytesIO(content))], return_tensors="np")
    assert np.array_equal(tiles, expected["pixel_values"][0].transpose(0, 2, 3, 1))


def test_the_place_of_an_image_says_which_rows_it_takes(tmp_path: Path) -> None:
    how = structs.replace(HOW, pinpoints=GRIDS[0])
    tokenizer = make_tokenizer(others=("<image>",))
    image_id = tokenizer.token_to_id("<image>")
    assert image_id is not None
    vision = structs.replace(
        VISION,
        family="llava_next",
        image_size=SIDE,
        patch_size=PATCH,
        scale_factor=1,
        image_token_id=image_id,
        processing=how,
    )
    placement, found = ImagePlacement(vision, tokenizer), []
    for size in ((96, 37), (96, 38)):
        content = file_of(PIL.Image.new("RGB", size), "PNG")
        job = PrepareImage(content, "llava_next", how, True, 10_000, str(tmp_path))
        prepared = prepare(job)
        assert isinstance(prepared, PreparedImage)
        found.append(prepared)
    wide, other = found
    assert wide.digest != other.digest, "black tiles are the same, but not the rows that show an image"

    texts = placement.texts_of("see <image> and <image>", found)
    ids = array("i", [1, *[image_id] * texts[0].split(" and ")[0].count("<image>"), 2])
    ids.extend([image_id] * texts[0].split(" and ")[1].count("<image>"))
    items = placement.items_of(ids, found)

    for item, prepared in zip(items, found, strict=True):
        rows = llava_next.rows_of(vision, prepared.rows, prepared.columns)
        assert array("i", item.rows).tolist() == [n for piece in rows for n in piece]
        ((_, length),) = runs_of(item)
        assert length == sum(count for _, count in rows)
