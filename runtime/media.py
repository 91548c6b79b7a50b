"""Images of a prompt as ids and positions: what the scheduler, the dispatcher and their checks have in common."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .messages import MediaItem


def runs_of(item: MediaItem) -> Iterator[tuple[int, int]]:
    """The runs (start, length) of an image; see `MediaItem`."""
    values = memoryview(item.runs).cast("i").tolist()
    return zip(values[::2], values[1::2], strict=True)


def with_image_ids(input_ids: bytes, media: Sequence[MediaItem], image_ids: Sequence[int]) -> bytes:
    """The prompt with an id of each image where the model's placeholder is, [prompt_len] int32.

    Two such prompts are equal only if their images are, provided that different images have different ids.
    """
    token_ids = array("i", input_ids)
    for item, image_id in zip(media, image_ids, strict=True):
        for start, length in runs_of(item):
            token_ids[start : start + length] = array("i", [image_id]) * length
    return token_ids.tobytes()


def routing_id(item: MediaItem) -> int:
    """A negative int32 of an image's digest, for maps in which a collision costs time and not a wrong answer."""
    return int.from_bytes(item.digest[:4], "little", signed=True) | -(1 << 31)
