"""Images of LLaVA-NeXT: an image to a small copy and the tiles of a padded one, and its text in a prompt.

The pixels equal those of `LlavaNextImageProcessorPil` of transformers before they are normalized, and the text that of
`LlavaNextProcessor`. The sizes are computed in the same floating-point operations. The two numbers of an image are its
height and width: the rows of its patches in a prompt follow from them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ....models.spec.vision_spec import ImageProcessing, VisionSpec
from . import llava

if TYPE_CHECKING:
    from PIL.Image import Image

VERSION: Final = b"llava_next-1"
special_texts = llava.special_texts


def tiles_of(
    image: Image, processing: ImageProcessing, *, splits: bool
) -> tuple[npt.NDArray[np.uint8], int, int]:
    """A copy of the image in another ratio and, with `splits`, its tiles row by row, in black where it ends.

    Returns:
        [tiles, tile_size, tile_size, 3] uint8, and height and width of the image; 0, 0 if there is only the copy.
    """
    import PIL.Image

    size, resample = processing.tile_size, PIL.Image.Resampling(processing.resample)
    small = np.asarray(image.resize((size, size), resample))[None]
    if not splits or not processing.splits:
        return small, 0, 0
    width, height = image.size
    fittest = _fittest(height, width, processing.pinpoints)
    by_height, by_width = fittest[0] / height, fittest[1] / width
    if by_width < by_height:
        inner = (min(math.ceil(height * by_width), fittest[0]), fittest[1])
    else:
        inner = (fittest[0], min(math.ceil(width * by_height), fittest[1]))
    top, left = ((whole - part) // 2 for whole, part in zip(fittest, inner, strict=True))
    padded = np.zeros((*fittest, 3), np.uint8)
    padded[top : top + inner[0], left : left + inner[1]] = np.asarray(image.resize(inner[::-1], resample))
    rows, columns = (whole // size for whole in fittest)
    tiles = padded.reshape(rows, size, columns, size, 3).swapaxes(1, 2).reshape(-1, size, size, 3)
    return np.ascontiguousarray(np.concatenate((small, tiles))), height, width


def prompt_text(vision: VisionSpec, rows: int, columns: int) -> str:
    """The text in the place of an image of `rows` x `columns` pixels."""
    return vision.image_token * sum(length for _, length in rows_of(vision, rows, columns))


def rows_of(vision: VisionSpec, height: int, width: int) -> list[tuple[int, int]]:
    """The rows of the encoder in the place of an image: `MediaItem.rows`.

    The rows of the copy come first. Then a row of patches goes through all tiles that stand side by side, without those
    that show only black, and ends with the last row of the last of these tiles.

    Args:
        height, width: of `tiles_of`.
    """
    per_tile, grid = vision.rows_per_tile, vision.grid
    if not height:
        return [(0, per_tile)]
    how = vision.processing
    fittest = _fittest(height, width, how.pinpoints)
    columns = fittest[1] // how.tile_size
    kept_rows, kept_columns = _kept(height, width, fittest[0] // how.tile_size * grid, columns * grid)
    first_row = (fittest[0] // how.tile_size * grid - kept_rows) // 2
    first_column = (columns * grid - kept_columns) // 2
    end = first_column + kept_columns
    found = [(0, per_tile - 1)]
    for row in range(first_row, first_row + kept_rows):
        beside = 1 + row // grid * columns  # the first tile of those side by side
        left = first_column
        while left < end:
            length = min(end - left, grid - left % grid)
            found.append(((beside + left // grid) * per_tile + row % grid * grid + left % grid, length))
            left += length
        found.append(((beside + max(end - 1, 0) // grid + 1) * per_tile - 1, 1))
    return found


def _fittest(height: int, width: int, pinpoints: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """The height and width that show most pixels of an image, and of equal ones the smallest."""

    def fitness(whole: tuple[int, int]) -> tuple[int, int]:
        scale = min(whole[1] / width, whole[0] / height)
        shown = min(int(width * scale) * int(height * scale), height * width)
        return shown, shown - whole[0] * whole[1]

    return max(pinpoints, key=fitness)


def _kept(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """The rows and columns of patches, out of so many, that show an image of this height and width."""
    if width / height > columns / rows:
        return rows - (rows - int(round(height * (columns / width), 7))) // 2 * 2, columns
    return rows, columns - (columns - int(round(width * (rows / height), 7))) // 2 * 2
