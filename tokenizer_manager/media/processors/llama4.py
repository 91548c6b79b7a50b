"""Images of Llama 4: an image to the tiles of a padded one and a copy of the whole, and its text in a prompt.

The tiles are those of `Llama4ImageProcessor` of transformers before they are normalized, and the text that of
`Llama4Processor`. The sizes are computed in the same floating-point operations. Values of pixels differ by 1 at most:
that processor resizes with torch, which rounds the weights of Pillow's filter to 16 bits.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ....models.spec.vision_spec import ImageProcessing, VisionSpec

if TYPE_CHECKING:
    from PIL.Image import Image

VERSION: Final = b"llama4-1"
_BESIDE, _BELOW = "<|tile_x_separator|>", "<|tile_y_separator|>"
"""After a tile that is not the last of its row, and after the last one."""


def tiles_of(
    image: Image, processing: ImageProcessing, *, splits: bool
) -> tuple[npt.NDArray[np.uint8], int, int]:
    """The tiles of an image row by row, which is black on the right and below, and in how many rows they stand.

    If they are several, a copy of the whole image in another ratio follows. Without `splits` it is one tile.

    Returns:
        [tiles, tile_size, tile_size, 3] uint8, and rows and columns; 0, 0 if there is only one tile.
    """
    import PIL.Image

    size, resample = processing.tile_size, PIL.Image.Resampling(processing.resample)
    rows, columns = _fittest(image.height, image.width, size, processing.max_tiles if splits else 1)
    height, width = _inner(image.height, image.width, rows * size, columns * size, size)
    padded = np.zeros((rows * size, columns * size, 3), np.uint8)
    padded[:height, :width] = np.asarray(image.resize((width, height), resample))
    tiles = padded.reshape(rows, size, columns, size, 3).swapaxes(1, 2).reshape(-1, size, size, 3)
    if rows == columns == 1:
        return tiles, 0, 0
    whole = np.asarray(image.resize((size, size), resample))[None]
    return np.ascontiguousarray(np.concatenate((tiles, whole))), rows, columns


def prompt_text(vision: VisionSpec, rows: int, columns: int) -> str:
    """The text in the place of an image."""
    tile = vision.image_token * vision.rows_per_tile
    tiles = (_BESIDE.join([tile] * columns) + _BELOW) * rows
    return f"{vision.begin_token}{tiles}{vision.global_token}{tile}{vision.end_token}"


def special_texts(vision: VisionSpec) -> str:
    """A regular expression of the special tokens of images."""
    own = (vision.image_token, vision.begin_token, vision.end_token, vision.global_token)
    return "|".join(map(re.escape, (*own, _BESIDE, _BELOW)))


def _fittest(height: int, width: int, size: int, most: int) -> tuple[int, int]:
    """The fewest rows and columns of tiles in which an image need not be scaled down, or only the least.

    Ratios are compared in float32, as in transformers.
    """
    scales = {
        (rows, columns): min(
            np.float32(columns * size) / np.float32(width), np.float32(rows * size) / np.float32(height)
        )
        for rows in range(1, most + 1)
        for columns in range(1, most // rows + 1)
    }
    enlarging = [scale for scale in scales.values() if scale >= 1]
    best = min(enlarging) if enlarging else max(scales.values())
    return min((grid for grid, scale in scales.items() if scale == best), key=math.prod)


def _inner(height: int, width: int, most_rows: int, most_columns: int, size: int) -> tuple[int, int]:
    """The height and width of an image within its tiles: it is enlarged to the side of one tile at most.

    A side that the tiles bound is a tensor in transformers, and its ratio one of float32; else it is one of float64.
    """
    wanted = (max(height, size), max(width, size))
    target = (min(wanted[0], most_rows), min(wanted[1], most_columns))
    kinds = [np.float32 if bound < side else float for bound, side in zip(target, wanted, strict=True)]
    by_height, by_width = (
        kind(bound) / kind(side) for kind, bound, side in zip(kinds, target, (height, width), strict=True)
    )
    if by_width < by_height:
        return max(min(math.floor(kinds[1](height) * by_width), target[0]), 1), target[1]
    return target[0], max(min(math.floor(kinds[0](width) * by_height), target[1]), 1)
