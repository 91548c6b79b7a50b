"""Images of Idefics3 and SmolVLM: an image to tiles, and its text in a prompt.

The pixels equal those of `Idefics3ImageProcessorPil` of transformers before they are normalized, and the text that of
`Idefics3Processor`. The sizes are computed in the same floating-point operations, since some hit whole numbers.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from ....models.spec.vision_spec import ImageProcessing, VisionSpec

if TYPE_CHECKING:
    from PIL.Image import Image

VERSION: Final = b"idefics3-1"
"""Changes with each change of pixels; a part of the digests."""
_MAX_SIDE: Final = 4096


def tiles_of(
    image: Image, processing: ImageProcessing, *, splits: bool
) -> tuple[npt.NDArray[np.uint8], int, int]:
    """The tiles of an image, and in how many rows and columns they stand.

    With `splits` an image larger than a tile is resized to whole tiles; its tiles row by row are followed by a copy of
    the whole image. Else the whole image becomes one tile, which changes its ratio.

    Args:
        image: RGB.

    Returns:
        [tiles, tile_size, tile_size, 3] uint8, and rows and columns; 0, 0 if there is only the whole image.
    """
    import PIL.Image

    size, resample = processing.tile_size, PIL.Image.Resampling(processing.resample)
    if processing.longest_edge is not None:
        image = image.resize(_scaled(*image.size, processing.longest_edge), resample)
    if not splits:
        return _stacked([image.resize((size, size), resample)]), 0, 0
    image = image.resize(_whole_tiles(*image.size, size), resample)
    columns, rows = image.width // size, image.height // size
    if columns == rows == 1:
        return _stacked([image]), 0, 0
    boxes = [
        (column * size, row * size, (column + 1) * size, (row + 1) * size)
        for row in range(rows)
        for column in range(columns)
    ]
    tiles = [image.crop(box) for box in boxes]
    return _stacked([*tiles, image.resize((size, size), resample)]), rows, columns


def prompt_text(vision: VisionSpec, rows: int, columns: int) -> str:
    """The text in the place of an image; each of its placeholders takes a row of the encoder.

    Args:
        rows, columns: of `tiles_of`.
    """
    around, image = vision.begin_token, vision.image_token * vision.rows_per_tile
    text = ""
    for row in range(1, rows + 1):
        text += "".join(f"{around}<row_{row}_col_{column}>{image}" for column in range(1, columns + 1)) + "\n"
    if rows:
        text += "\n"
    return f"{text}{around}{vision.global_token}{image}{around}"


def special_texts(vision: VisionSpec) -> str:
    """A regular expression of the special tokens of images, which a user's text must not become."""
    fixed = (vision.image_token, vision.begin_token, vision.global_token)
    return "|".join([*map(re.escape, fixed), r"<row_\d+_col_\d+>"])


def _scaled(width: int, height: int, longest: int) -> tuple[int, int]:
    """The size with this longer side and an even shorter one, but at most 4096 pixels."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > _MAX_SIDE:
        width, height = _MAX_SIDE, int(_MAX_SIDE / ratio)
    elif height > width and height > _MAX_SIDE:
        width, height = int(_MAX_SIDE * ratio), _MAX_SIDE
    return max(width, 1), max(height, 1)


def _whole_tiles(width: int, height: int, size: int) -> tuple[int, int]:
    ratio = width / height
    if width >= height:
        width = math.ceil(width / size) * size
        height = math.ceil(int(width / ratio) / size) * size
    else:
        height = math.ceil(height / size) * size
        width = math.ceil(int(height * ratio) / size) * size
    return width, height


def _stacked(tiles: list[Any]) -> npt.NDArray[np.uint8]:
    return np.stack([np.asarray(tile, dtype=np.uint8) for tile in tiles])
