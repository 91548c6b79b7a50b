"""`PROCESSORS`: the processor of each family of models that see images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from . import gemma3, gemma4, idefics3, internvl, llama4, llava, llava_next, pixtral, qwen2_vl

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL.Image import Image

    from ....models.spec.vision_spec import ImageProcessing, VisionFamily, VisionSpec


class Processor(Protocol):
    """A module of this folder.

    Attributes:
        VERSION: changes with each change of pixels; a part of the digests.
    """

    @property
    def VERSION(self) -> bytes: ...  # noqa: N802

    def tiles_of(
        self, image: Image, processing: ImageProcessing, *, splits: bool
    ) -> tuple[npt.NDArray[np.uint8], int, int]:
        """The tiles of an RGB image, contiguous [tiles, height, width, 3], and in how many rows and columns they stand.

        Rows and columns are 0 if there is only the whole image of a fixed size; those of LLaVA-NeXT are pixels.
        `splits`: an image larger than a tile becomes several; one of any size keeps more pixels than a small copy has.

        Raises:
            BadImage: the image cannot be used.
        """
        ...

    def prompt_text(self, vision: VisionSpec, rows: int, columns: int) -> str:
        """The text in the place of the template's marker; each placeholder in it takes a row of the encoder."""
        ...

    def special_texts(self, vision: VisionSpec) -> str:
        """A regular expression of the special tokens of images, which a user's text must not become."""
        ...


PROCESSORS: Final[dict[VisionFamily, Processor]] = {
    "idefics3": idefics3,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "gemma4_unified": gemma4,
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_vl,
    "qwen3_vl": qwen2_vl,
    "llava": llava,
    "llava_next": llava_next,
    "internvl": internvl,
    "pixtral": pixtral,
    "llama4": llama4,
}
