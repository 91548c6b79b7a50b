"""`PromptImages`: the images of a request: the positions of their tiles, and the prompt with and without their ids."""

from __future__ import annotations

from typing import NamedTuple

from ...runtime.media import runs_of
from ...runtime.messages import MediaItem


class PromptTile(NamedTuple):
    """A tile of an image at its place in a prompt.

    Attributes:
        item: the image.
        number: of the tile in the image, from 0.
        spans: (position, length, first row within the tile), in order; the rows of a tile may be interrupted by text.
    """

    item: MediaItem
    number: int
    spans: tuple[tuple[int, int, int], ...]

    @property
    def key(self) -> tuple[bytes, int]:
        """Equal for tiles with equal rows."""
        return self.item.digest, self.number

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
    """

    input_ids: bytes
    keyed_ids: bytes
    tiles: tuple[PromptTile, ...]
    ends: tuple[int, ...]


def tiles_of(item: MediaItem, tile_rows: int) -> list[PromptTile]:
    """The tiles of an image: its runs, cut where the rows of a tile end. The runs have `tile_rows` rows for each."""
    spans: list[list[tuple[int, int, int]]] = [[] for _ in range(item.shape[0])]
    row = 0
    for start, length in runs_of(item):
        while length:
            number, first_row = divmod(row, tile_rows)
            count = min(length, tile_rows - first_row)
            spans[number].append((start, count, first_row))
            start, length, row = start + count, length - count, row + count
    return [PromptTile(item, number, tuple(each)) for number, each in enumerate(spans)]
