"""Images of Mistral 3 with Pixtral's tower: an image to one tile of any size, and its text in a prompt.

The pixels equal those of `PixtralImageProcessorPil` of transformers before they are normalized, and the text that of
`PixtralProcessor`. The sizes are computed in the same floating-point operations.
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

VERSION: Final = b"pixtral-1"
_LOW_EDGE: Final = 512


def tiles_of(
    image: Image, processing: ImageProcessing, *, splits: bool
) -> tuple[npt.NDArray[np.uint8], int, int]:
    """The image in about its ratio, with sides that are multiples of `tile_size`, and its rows and columns of them.

    Both sides have at most `longest_edge` pixels, less if `max_pixels` allows no such square; without `splits` 512.

    Raises:
        BadImage: nothing is left of the shorter side.
    """
    import PIL.Image

    factor, longest = processing.tile_size, processing.longest_edge
    assert longest is not None
    fitting = max(factor, math.isqrt(processing.max_pixels) // factor * factor)
    longest = min(longest, fitting if splits else min(fitting, max(factor, _LOW_EDGE // factor * factor)))
    width, height = image.size
    if (ratio := max(height / longest, width / longest)) > 1:
        width, height = math.floor(width / ratio), math.floor(height / ratio)
    if not width or not height:
        raise BadImage(
            "invalid_image",
            f"has {image.width:,} x {image.height:,} pixels, of which nothing is left when its longer side is "
            f"{longest:,}; cut it",
        )
    columns, rows = (width - 1) // factor + 1, (height - 1) // factor + 1
    resized = image.resize((columns * factor, rows * factor), PIL.Image.Resampling(processing.resample))
    return np.asarray(resized)[None], rows, columns


def prompt_text(vision: VisionSpec, rows: int, columns: int) -> str:
    """The text in the place of a placeholder: each row of them ends with a token of its own."""
    row = vision.image_token * columns
    return (row + vision.begin_token) * (rows - 1) + row + vision.end_token


def special_texts(vision: VisionSpec) -> str:
    """A regular expression of the special tokens of images."""
    return "|".join(map(re.escape, (vision.image_token, vision.begin_token, vision.end_token)))
