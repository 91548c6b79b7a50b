"""Images of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: an image to one tile of any size, and its text in a prompt.

The pixels equal those of `Qwen2VLImageProcessorPil` of transformers before they are normalized, and the text that of
`Qwen2VLProcessor`. The sizes are computed in the same floating-point operations.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ....models.spec.vision_spec import ImageProcessing, VisionSpec
from ..decode import BadImage

if TYPE_CHECKING:
    from PIL.Image import Image

VERSION: Final = b"qwen2_vl-1"
_MOST_RATIO: Final = 200
_LOW_PIXELS: Final = 512 * 512
_OTHERS: Final = ("<|video_pad|>", "<|vision_pad|>")
"""Special tokens of videos, which texts must not become either."""


def tiles_of(
    image: Image, processing: ImageProcessing, *, splits: bool
) -> tuple[npt.NDArray[np.uint8], int, int]:
    """The image in its ratio, with sides that are multiples of `tile_size`, and its rows and columns of them.

    Without `splits` it has at most 512 x 512 pixels.

    Raises:
        BadImage: one side is more than 200 times as long as the other.
    """
    import PIL.Image

    factor, most = processing.tile_size, processing.max_pixels
    if not splits:
        most = max(processing.min_pixels, min(most, _LOW_PIXELS))
    width, height = _size(*image.size, factor, processing.min_pixels, most)
    resized = image.resize((width, height), PIL.Image.Resampling(processing.resample))
    return np.asarray(resized)[None], height // factor, width // factor


def prompt_text(vision: VisionSpec, rows: int, columns: int) -> str:
    """The text in the place of a placeholder, around which the template has written the other special tokens."""
    return vision.image_token * (rows * columns)


def special_texts(vision: VisionSpec) -> str:
    """A regular expression of the special tokens of images."""
    return "|".join(map(re.escape, (vision.image_token, vision.begin_token, vision.end_token, *_OTHERS)))


def _size(width: int, height: int, factor: int, least: int, most: int) -> tuple[int, int]:
    if max(width, height) / min(width, height) > _MOST_RATIO:
        raise BadImage(
            "invalid_image",
            f"has {width:,} x {height:,} pixels, but one side must not be more than {_MOST_RATIO} times as long as the "
            "other; cut it",
        )
    rows, columns = round(height / factor), round(width / factor)
    if rows * columns * factor**2 > most:
        by = math.sqrt((height * width) / most)
        rows, columns = (max(1, math.floor(size / by / factor)) for size in (height, width))
    elif rows * columns * factor**2 < least:
        by = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(size * by / factor) for size in (height, width))
    return columns * factor, rows * factor
