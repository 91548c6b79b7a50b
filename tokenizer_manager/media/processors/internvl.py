"""Images of InternVL: an image to tiles and a small copy of the whole, and its text in a prompt.

The pixels equal those of `GotOcr2ImageProcessorPil` of transformers before they are normalized, with the tiles that
`InternVLProcessor` asks for, and the text equals that of `InternVLProcessor`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ....models.spec.vision_spec import ImageProcessing, VisionSpec

if TYPE_CHECKING:
    from PIL.Image import Image

VERSION: Final = b"internvl-1"


def tiles_of(
    image: Image, processing: ImageProcessing, *, splits: bool
) -> tuple[npt.NDArray[np.uint8], int, int]:
    """The tiles of an image row by row, and in how many rows and columns they stand.

    With `splits` the image is resized to the tiles whose ratio is nearest to its own; if they are several, a copy of
    the whole image follows. Else the whole image becomes one tile.

    Returns:
        [tiles, tile_size, tile_size, 3] uint8, and rows and columns; 0, 0 if there is only the whole image.
    """
    import PIL.Image

    size, resample = processing.tile_size, PIL.Image.Resampling(processing.resample)
    rows, columns = _nearest_grid(*image.size, processing) if splits else (1, 1)
    whole = np.asarray(image.resize((size, size), resample))[None]
    if rows == columns == 1:
        return whole, 0, 0
    pixels = np.asarray(image.resize((columns * size, rows * size), resample))
    tiles = pixels.reshape(rows, size, columns, size, 3).swapaxes(1, 2).reshape(-1, size, size, 3)
    # The tiles of a single row are a view in the order of the image, which `concatenate` keeps.
    return np.ascontiguousarray(np.concatenate((tiles, whole))), rows, columns


def prompt_text(vision: VisionSpec, rows: int, columns: int) -> str:
    """The text in the place of an image."""
    num_tiles = rows * columns + 1
    return f"{vision.begin_token}{vision.image_token * (num_tiles * vision.rows_per_tile)}{vision.end_token}"


def special_texts(vision: VisionSpec) -> str:
    """A regular expression of the special tokens of images."""
    return "|".join(map(re.escape, (vision.image_token, vision.begin_token, vision.end_token)))


def _nearest_grid(width: int, height: int, processing: ImageProcessing) -> tuple[int, int]:
    """The rows and columns of tiles; of equal ratios the larger one, unless it has twice the image's pixels or more."""
    most, tile = processing.max_tiles, processing.tile_size**2
    grids = [
        (rows, columns)
        for columns in range(1, most + 1)
        for rows in range(1, most // columns + 1)
        if rows * columns >= processing.min_tiles
    ]
    best, least = (1, 1), float("inf")
    for rows, columns in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        difference = abs(width / height - columns / rows)
        if difference < least or (difference == least and width * height > 0.5 * tile * rows * columns):
            best, least = (rows, columns), difference
    return best
