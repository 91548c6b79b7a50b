"""Images of LLaVA 1.5: an image to one square tile, and its text in a prompt.

The pixels equal those of `CLIPImageProcessorPil` of transformers before they are normalized, or of `SiglipImage-
ProcessorPil` for towers that see the whole image, and the text that of `LlavaProcessor`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ....models.spec.vision_spec import ImageProcessing, VisionSpec
from ..decode import BadImage

if TYPE_CHECKING:
    from PIL.Image import Image

VERSION: Final = b"llava-1"
_MOST_RATIO: Final = 200
"""Before the middle is cut out, the longer side has so many times the pixels of a tile's side."""


def tiles_of(
    image: Image, processing: ImageProcessing, *, splits: bool
) -> tuple[npt.NDArray[np.uint8], int, int]:
    """The tile of an image, [1, tile_size, tile_size, 3] uint8, 0, 0: its middle, or all of it in another ratio.

    Raises:
        BadImage: of the middle, if one side is more than 200 times as long as the other.
    """
    import PIL.Image

    size, resample = processing.tile_size, PIL.Image.Resampling(processing.resample)
    if not processing.crops:
        return np.asarray(image.resize((size, size), resample))[None], 0, 0
    short, long = sorted(image.size)
    if long > _MOST_RATIO * short:
        raise BadImage(
            "invalid_image",
            f"has {image.width:,} x {image.height:,} pixels, but one side must not be more than {_MOST_RATIO} times as "
            "long as the other; cut it",
        )
    long = int(size * long / short)
    resized = image.resize((size, long) if image.width <= image.height else (long, size), resample)
    left, top = (resized.width - size) // 2, (resized.height - size) // 2
    return np.asarray(resized.crop((left, top, left + size, top + size)))[None], 0, 0


def prompt_text(vision: VisionSpec, rows: int, columns: int) -> str:
    """The text in the place of an image."""
    return vision.image_token * vision.rows_per_tile


def special_texts(vision: VisionSpec) -> str:
    """A regular expression of the special token of images."""
    return re.escape(vision.image_token)
