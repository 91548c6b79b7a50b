"""Images of a prompt: their positions, the ids that stand for them, their rows, and which can never run.

The scheduler, the dispatcher, the tokenizer manager and `LLM` have these in common.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .feasibility import Capacity
from .text import counted

if TYPE_CHECKING:
    from .messages import MediaItem


def runs_of(item: MediaItem) -> Iterator[tuple[int, int]]:
    """The runs (start, length) of an image; see `MediaItem`."""
    values = memoryview(item.runs).cast("i").tolist()
    return zip(values[::2], values[1::2], strict=True)


def rows_at_runs(item: MediaItem, tile_rows: int) -> list[tuple[int, int]]:
    """The rows (first, length) at an image's positions, numbered through all tiles of `tile_rows` rows."""
    values = memoryview(item.rows).cast("i").tolist()
    return [*zip(values[::2], values[1::2], strict=True)] or [(0, item.shape[0] * tile_rows)]


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


def tile_rows(item: MediaItem, capacity: Capacity) -> int:
    """Rows of each tile of an image."""
    side = capacity.encoder_row_pixels
    return item.shape[1] // side * (item.shape[2] // side) if side else capacity.encoder_tile_rows


def reason_against_images(media: Sequence[MediaItem], capacity: Capacity) -> str | None:
    """Reason why a request with these images can never run; None if it can. An image that comes twice counts once."""
    if not media:
        return None
    if capacity.num_stages > 1:
        return (
            "the request has images, which a server with --pp does not take; send text, or start it with --tp"
        )
    if not capacity.num_encoder_rows and capacity.encoder_tile_rows:
        return (
            "the request has images, which a server with --nnodes does not take: their pixels are on one machine; send "
            "text, or serve the model on one machine"
        )
    if not capacity.num_encoder_rows:
        return "the request has images, but this server computes text only; send text, or serve a model with a tower"
    images = {item.digest: item for item in media}.values()
    num_tiles = sum(item.shape[0] for item in images)
    block = capacity.encoder_tile_rows
    need = sum(item.shape[0] * -(-tile_rows(item, capacity) // block) * block for item in images)
    if need <= capacity.num_encoder_rows:
        return None
    return (
        f"the images have {counted(num_tiles, 'tile')} with {need} rows, and the encoder cache holds "
        f"{capacity.num_encoder_rows}; send fewer or smaller images, or raise --mm-encoder-cache-tokens"
    )
