"""`PromptImages`: the images of a request: the positions of their tiles, and the prompt with and without their ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...runtime.media import rows_at_runs, runs_of
from ...runtime.messages import MediaItem


class PromptTile(NamedTuple):
    """A tile of an image at its place in a prompt.

    Attributes:
        item: the image.
        number: of the tile in the image, from 0.
        spans: (position, length, first row within the tile), in order of positions; text or rows of other tiles may be
            between them, and a row may come again.
        num_blocks: blocks of the encoder's buffer that hold its rows, see `EncoderCache`.
    """

    item: MediaItem
    number: int
    spans: tuple[tuple[int, int, int], ...]
    num_blocks: int = 1

    @property
    def key(self) -> tuple[bytes, int]:
        """Equal for tiles with equal rows."""
        return self.item.digest, self.number

    @property
    def pixels(self) -> int:
        """Its size, to which the work on it is about proportional."""
        return self.item.shape[1] * self.item.shape[2]

    @property
    def start(self) -> int:
        """Position of its first row."""
        return self.spans[0][0]

    @property
    def end(self) -> int:
        """Position after its last row."""
        position, length, _ = self.spans[-1]
        return position + length


class PromptImages(NamedTuple):
    """The images of a request.

    Attributes:
        input_ids: the prompt as the model reads it, int32 bytes.
        keyed_ids: the same with an id of its own for each image.
        tiles: of all images, in order of position.
        ends: position after each image.
        rope: `NewReq.rope`.
        whole: (start, end) of runs within which no chunk and no prefix may end, in order (`Capacity.images_are_whole`).
    """

    input_ids: bytes
    keyed_ids: bytes
    tiles: tuple[PromptTile, ...]
    ends: tuple[int, ...]
    rope: bytes = b""
    whole: tuple[tuple[int, int], ...] = ()


def tiles_of(item: MediaItem, tile_rows: int, num_blocks: int = 1) -> list[PromptTile]:
    """The tiles of an image: its runs, cut where the rows of a tile end; without tiles of which no row is used.

    Args:
        tile_rows: rows of each tile.
        num_blocks: of each tile.
    """
    spans: list[list[tuple[int, int, int]]] = [[] for _ in range(item.shape[0])]
    rows = iter(rows_at_runs(item, tile_rows))
    row = left = 0
    for start, length in runs_of(item):
        while length:
            if not left:
                row, left = next(rows)
            number, first_row = divmod(row, tile_rows)
            count = min(length, left, tile_rows - first_row)
            spans[number].append((start, count, first_row))
            start, length, row, left = start + count, length - count, row + count, left - count
    return [PromptTile(item, number, tuple(each), num_blocks) for number, each in enumerate(spans) if each]


def rope_axes(media: Sequence[MediaItem], prompt_len: int, row_pixels: int) -> bytes:
    """[3, prompt_len] int32: the positions of a prompt's tokens in time, row and column (M-RoPE).

    Those of text count up, equal on all axes. An image begins with the next number on all axes; the second and third
    add the row and the column in its grid. Text goes on after the largest of the image's numbers.

    Args:
        row_pixels: see `Capacity.encoder_row_pixels`.
    """
    axes = np.empty((3, prompt_len), dtype=np.int32)
    end = follows = 0
    for item in media:
        height, width = item.shape[1] // row_pixels, item.shape[2] // row_pixels
        grid = np.stack(
            [np.zeros(height * width, dtype=np.int32), *np.divmod(np.arange(height * width), width)]
        )
        ((start, length),) = runs_of(item)
        axes[:, end:start] = follows + np.arange(start - end)
        follows += start - end
        axes[:, start : start + length] = follows + grid
        end, follows = start + length, follows + max(height, width)
    axes[:, end:] = follows + np.arange(prompt_len - end)
    return axes.tobytes()
