"""Images of Gemma 4: an image to one tile of any size, and its text in a prompt.

The pixels equal those of `Gemma4ImageProcessorPil` of transformers before they are rescaled, and the text that of
`Gemma4Processor`. The sizes are computed in the same floating-point operations.
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

VERSION: Final = b"gemma4-1"
_LOW_PIXELS: Final = 512 * 512
_OTHERS: Final = ("<|video|>", "<|audio|>", "<|audio>", "<audio|>")
"""Special tokens of videos and audio, which texts must not become either."""


def tiles_of(
    image: Image, processing: ImageProcessing, *, splits: bool
) -> tuple[npt.NDArray[np.uint8], int, int]:
    """The image in about its ratio, with sides that are multiples of `tile_size`, and its rows and columns of them.

    It is enlarged or reduced to almost `max_pixels`; without `splits` to 512 x 512 pixels.
    """
    import PIL.Image

    factor, most = processing.tile_size, processing.max_pixels
    if not splits:
        most = max(processing.min_pixels, min(most, _LOW_PIXELS), factor**2)
    rows, columns = _size(*image.size, factor, most // factor**2)
    resized = image.resize((columns * factor, rows * factor), PIL.Image.Resampling(processing.resample))
    return np.asarray(resized)[None], rows, columns


def prompt_text(vision: VisionSpec, rows: int, columns: int) -> str:
    """The text in the place of a placeholder."""
    return f"{vision.begin_token}{vision.image_token * (rows * columns)}{vision.end_token}"


def special_texts(vision: VisionSpec) -> str:
    """A regular expression of the special tokens of images."""
    return "|".join(map(re.escape, (vision.image_token, vision.begin_token, vision.end_token, *_OTHERS)))


def _size(width: int, height: int, factor: int, num_rows: int) -> tuple[int, int]:
    """Rows and columns of squares of `factor` pixels, together at most `num_rows`."""
    by = math.sqrt(num_rows * factor**2 / (height * width))
    rows, columns = (math.floor(by * size / factor) for size in (height, width))
    if not rows:
        return 1, max(1, min(math.floor(width / height), num_rows))
    if not columns:
        return min(math.floor(height / width), num_rows), 1
    return rows, columns
