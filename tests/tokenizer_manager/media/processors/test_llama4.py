"""Tiles of Llama 4 and their text, against the code of transformers' processors.

That of images needs torchvision, which is not installed in tests. Of it only three functions are called, which stand
here: `pad`, and the resizing and normalizing of the base class. The resizing is Pillow's, so that all pixels are equal;
another test compares it with torch's antialiased `interpolate`, which torchvision calls for uint8.
"""

from __future__ import annotations

import importlib.util
import io
import random
import sys
from array import array
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jinja2
import numpy as np
import PIL.Image
import pytest
import torch
import torch.nn.functional as F
from msgspec import structs
from transformers.image_utils import SizeDict
from transformers.models.llama4.processing_llama4 import Llama4Processor, chat_template

from engine.models.spec.vision_spec import LLAMA4_TEXTS
from engine.runtime.media import runs_of
from engine.tokenizer_manager.media.decode import decode_image
from engine.tokenizer_manager.media.placement import ImagePlacement
from engine.tokenizer_manager.media.processors import llama4
from engine.tokenizer_manager.media.sources import image_of_bytes
from engine.tokenizer_manager.media.worker import PreparedImage, PrepareImage, prepare

from ...fake_engine import make_tokenizer
from ..image_files import MODES, file_of, picture
from ..test_image_store import VISION
from .test_idefics3 import SIZES, processing

HOW = structs.replace(processing(0, 24, resample=2), longest_edge=None, min_tiles=1, max_tiles=16)


@pytest.fixture(scope="module")
def theirs() -> Any:
    """The module with transformers' processor of images; no other test gets it."""

    def pad(images: torch.Tensor, padding: list[int], fill: list[int]) -> torch.Tensor:
        assert fill == [0, 0, 0]
        left, top, right, bottom = padding
        return F.pad(images, (left, right, top, bottom))

    torchvision = ModuleType("torchvision.transforms.v2")
    torchvision.functional = SimpleNamespace(pad=pad, InterpolationMode=None)  # type: ignore[attr-defined]
    spec = importlib.util.find_spec("transformers.models.llama4.image_processing_llama4")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("torchvision", "torchvision.transforms", torchvision.__name__):
            patch.setitem(sys.modules, name, torchvision)
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module


def pillow(images: torch.Tensor, size: Any, resample: int) -> torch.Tensor:
    image = PIL.Image.fromarray(images[0].permute(1, 2, 0).numpy())
    resized = image.resize((size.width, size.height), PIL.Image.Resampling(resample))
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)[None]


def expected_of(
    theirs: Any, image: PIL.Image.Image, how: Any, most: int, resize: Any = pillow
) -> tuple[np.ndarray, list[int]]:
    """The tiles and their rows and columns."""
    whole = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    found = theirs.Llama4ImageProcessor._preprocess(
        SimpleNamespace(resize=resize, rescale_and_normalize=lambda images, *_: images),
        [whole],
        do_resize=True,
        size=SizeDict(height=how.tile_size, width=how.tile_size),
        resample=how.resample,
        do_rescale=False,
        rescale_factor=1.0,
        do_normalize=False,
        image_mean=None,
        image_std=None,
        max_patches=most,
        resize_to_max_canvas=False,
        disable_grouping=None,
        return_tensors=None,
    )
    return found["pixel_values"][0].permute(0, 2, 3, 1).numpy(), found["aspect_ratios"][0].tolist()


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("most", [16, 5, 1])
def test_tiles_and_text_are_those_of_transformers(theirs: Any, most: int) -> None:
    vision: Any = SimpleNamespace(**LLAMA4_TEXTS, rows_per_tile=4)
    for number, size in enumerate((*SIZES, (24, 24), (48, 24), (49, 24), (96, 97), (7, 100))):
        image, how = picture(*size, seed=number), structs.replace(HOW, max_tiles=most)
        expected, ratio = expected_of(theirs, image, how, most)

        tiles, rows, columns = llama4.tiles_of(image, how, splits=True)

        assert np.array_equal(tiles, expected) and tiles.flags.c_contiguous, size
        assert [rows or 1, columns or 1] == ratio, size
        text = Llama4Processor._prompt_split_image(SimpleNamespace(), ratio, 4)
        assert llama4.prompt_text(vision, rows, columns) == text
        small, *grid = llama4.tiles_of(image, HOW, splits=False)
        assert np.array_equal(small, expected_of(theirs, image, how, 1)[0]) and grid == [0, 0]


def test_sizes_of_many_images_are_those_of_transformers(theirs: Any) -> None:
    """Also where float32 and float64 differ by a pixel."""
    rng, size = random.Random(0), 336
    canvases = torch.tensor(theirs.find_supported_resolutions(16, SizeDict(height=size, width=size)))
    odd = [(2912, 1456), (1824, 3040), (1232, 3696), (2504, 1878), (616, 5742)]
    for number in range(300):
        most = (400, 3000, 12_000)[number % 3]
        height, width = rng.randrange(1, most), rng.randrange(1, most)
        if number % 5 == 0:
            height, width = odd.pop() if odd else (size * rng.randrange(1, 30), size * rng.randrange(1, 30))
        canvas = theirs.get_best_fit((height, width), canvases)
        target = tuple(
            min(max(side, size), bound) for side, bound in zip((height, width), canvas, strict=True)
        )
        inner = theirs.get_max_res_without_distortion((height, width), target)

        grid = llama4._fittest(height, width, size, 16)

        assert [side * size for side in grid] == canvas.tolist(), (height, width)
        own = llama4._inner(height, width, grid[0] * size, grid[1] * size, size)
        assert own == tuple(max(int(side), 1) for side in inner), (height, width)


@pytest.mark.parametrize("name", MODES)
def test_images_of_all_modes(theirs: Any, name: str) -> None:
    """Transparent pixels are white, as in transformers."""
    from transformers.image_transforms import convert_to_rgb

    mode, kind, options = MODES[name]
    content = file_of(picture(61, 43, mode), kind, **options)

    tiles, *_ = llama4.tiles_of(decode_image(content, 10_000), HOW, splits=True)

    image = PIL.Image.fromarray(convert_to_rgb(PIL.Image.open(io.BytesIO(content)), return_numpy=True))
    assert np.array_equal(tiles, expected_of(theirs, image, HOW, 16)[0])


def test_pixels_are_those_of_torch_but_for_rounding(theirs: Any) -> None:
    """Torch rounds the weights to 16 bits, Pillow to 22."""

    def resize(images: torch.Tensor, size: Any, resample: int) -> torch.Tensor:
        assert resample == 2
        return F.interpolate(images, (size.height, size.width), mode="bilinear", antialias=True)

    for number, size in enumerate(((640, 480), (97, 89), (33, 17), (255, 256), (1000, 300))):
        image = picture(*size, seed=number)
        expected, _ = expected_of(theirs, image, HOW, 16, resize)

        tiles, *_ = llama4.tiles_of(image, HOW, splits=True)

        differences = np.abs(tiles.astype(int) - expected)
        assert differences.max() <= 1 and differences.mean() < 0.03, (size, differences.mean())


def test_the_place_of_an_image_in_a_published_prompt(tmp_path: Path) -> None:
    """A text with all special tokens takes no rows; a tile is a run of placeholders, the copy is the last one."""
    special = [*dict.fromkeys(LLAMA4_TEXTS.values()), "<|tile_x_separator|>", "<|tile_y_separator|>"]
    tokenizer = make_tokenizer(others=special)
    image_id = tokenizer.token_to_id("<|patch|>")
    assert image_id is not None
    vision = structs.replace(
        VISION,
        family="llama4",
        image_size=24,
        patch_size=6,
        image_token_id=image_id,
        processing=HOW,
        **LLAMA4_TEXTS,
    )
    placement, prepared = ImagePlacement(vision, tokenizer), []
    for size in ((72, 30), (20, 10)):
        job = PrepareImage(file_of(picture(*size)), "llama4", HOW, True, 10_000, str(tmp_path))
        reply = prepare(job)
        assert isinstance(reply, PreparedImage)
        prepared.append(reply)
    assert [reply.shape[0] for reply in prepared] == [7, 1]
    image = {"source": image_of_bytes(b"", "messages[0].content[0]")}
    content = [image, {"type": "text", "text": "".join(special)}, image]
    cut = placement.without_markers([{"role": "user", "content": content}])
    template = jinja2.Environment().from_string(chat_template)

    texts = placement.texts_of(template.render(messages=cut, bos_token=""), prepared)

    ids = array("i", chain(*(tokenizer.encode(text, add_special_tokens=False) for text in texts)))
    items = placement.items_of(ids, prepared)
    assert [[length for _, length in runs_of(item)] for item in items] == [[4] * 7, [4]]
    own = "".join(llama4.prompt_text(vision, each.rows, each.columns) for each in prepared)
    assert {text: ids.count(tokenizer.token_to_id(text) or 0) for text in special} == {
        text: own.count(text) for text in special
    }
