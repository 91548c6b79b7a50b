"""Images of Gemma 3: an image to one square tile, and its text in a prompt.

The pixels equal those of `Gemma3ImageProcessorPil` of transformers before they are normalized, without pan and scan,
and the text that of `Gemma3Processor`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ....models.spec.vision_spec import ImageProcessing, VisionSpec

if TYPE_CHECKING:
    from PIL.Image import Image

VERSION: Final = b"gemma3-1"


def tiles_of(
    image: Image, processing: ImageProcessing, *, splits: bool
) -> tuple[npt.NDArray[np.uint8], int, int]:
    """The image resized to a tile, which changes its ratio: [1, tile_size, tile_size, 3] uint8, 0, 0."""
    import PIL.Image

    size = (processing.tile_size, processing.tile_size)
    return np.asarray(image.resize(size, PIL.Image.Resampling(processing.resample)))[None], 0, 0


def prompt_text(vision: VisionSpec, rows: int, columns: int) -> str:
    """The text in the place of an image."""
    placeholders = vision.image_token * vision.rows_per_tile
    return f"\n\n{vision.begin_token}{placeholders}{vision.end_token}\n\n"


def special_texts(vision: VisionSpec) -> str:
    """A regular expression of the special tokens of images."""
    return "|".join(map(re.escape, (vision.image_token, vision.begin_token, vision.end_token)))
