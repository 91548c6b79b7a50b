"""`EncoderRows`: the buffer with the rows of tiles, which the scheduler assigns, and the tower that fills it.

`StepPlan.encodes` names the rows, and `NewReq.media` the positions of a prompt that take them. A tile that cannot be
read becomes rows of NaN, so every request with the image ends with an error, and no other one does.
"""

# Shapes: R rows of the buffer, K numbers of a row (`VisionSpec.row_width`), T new tokens in the batch.

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from ...models.spec.vision_spec import VisionSpec
    from ...runtime.step_plan import Encode

logger = logging.getLogger(__name__)

Int64s = npt.NDArray[np.int64]


class ImageTokens(NamedTuple):
    """Tokens of a batch that take rows: [n] indices into the T, ascending, and [n] rows."""

    indices: Int64s
    rows: Int64s

    @classmethod
    def of(cls, chunks: Sequence[tuple[int, int, int, Int64s]]) -> ImageTokens | None:
        """The tokens of some chunks; None: there are none.

        Args:
            chunks: index of the first token among the T, its position, number of tokens, and the request's media,
                [n, 3] as in `NewReq.media`.
        """
        indices, rows = [], []
        for first, position, length, media in chunks:
            for start, run, first_row in media.tolist():
                begin, end = max(start, position), min(start + run, position + length)
                if begin < end:
                    indices.append(np.arange(first + begin - position, first + end - position))
                    rows.append(np.arange(first_row + begin - start, first_row + end - start))
        return cls(np.concatenate(indices), np.concatenate(rows)) if indices else None


class ImageEncoder(Protocol):
    """A tower with its connectors.

    Attributes:
        spec: the sizes.
        dtype: of the rows.
    """

    spec: VisionSpec
    dtype: torch.dtype

    def parts_of(self, tile: torch.Tensor) -> Iterator[torch.Tensor | None]:
        """[height, width, 3] uint8, in RGB, on any device -> [rows of the tile, K], in parts.

        Yields None before each part, then the rows. There are `VisionSpec.num_parts` for a tile, or for each block of
        rows of an image of any size.
        """
        ...


def ends_of_images(positions: Int64s, chunks: Sequence[tuple[int, int, int, Int64s]]) -> Int64s:
    """`BatchLayout.sees_to` of a batch with tokens at `positions` [T], for a model that sees images whole.

    `chunks`: see `ImageTokens.of`; runs of a request's media without a token between them are an image.
    """
    sees_to = positions + 1
    for first, position, length, media in chunks:
        starts, ends = media[:, 0], media[:, 0] + media[:, 1]
        between = np.flatnonzero(starts[1:] != ends[:-1])
        images = zip(
            starts[np.append(0, between + 1)].tolist(), ends[np.append(between, -1)].tolist(), strict=True
        )
        for start, end in images:
            if start < position + length and position < end:
                assert position <= start and end <= position + length, "a cut within an image"
                sees_to[first + start - position : first + end - position] = end
    return sees_to


class EncoderRows:
    """See the module.

    Attributes:
        rows: [R, K] in the serving dtype.
    """

    def __init__(self, tower: ImageEncoder, num_rows: int, size: int, device: torch.device) -> None:
        """`size`: K."""
        self.rows = torch.zeros((num_rows, size), dtype=tower.dtype, device=device)
        self._tower = tower
        self._failures: dict[int, str] = {}  # by the first row of a tile, or of a block
        self._begun: dict[
            int, Iterator[torch.Tensor | None]
        ] = {}  # the same: work of which other steps do the rest

    def encode(self, encodes: Sequence[Encode]) -> None:
        """Compute the rows of tiles, one tile after the other, or do parts of that."""
        per_tile = self._tower.spec.rows_per_tile
        for item in encodes:
            if item.first_part:
                if item.first_row in self._begun:  # else it could not be read when it was begun
                    self._go_on(item, item.first_row)
                continue
            tiles = self._read(item)
            for number in range(item.num_tiles):
                first = item.first_row + number * per_tile
                blocks = np.frombuffer(item.blocks, dtype=np.int32).tolist() or [first]
                for block in blocks:
                    self._begun.pop(block, None)  # work on a tile that has lost its rows
                if isinstance(tiles, str):
                    for block in blocks:
                        self.rows[block : block + per_tile] = float("nan")
                        self._failures[block] = tiles
                    continue
                for block in blocks:
                    self._failures.pop(block, None)
                if item.num_parts:
                    work = self._begun[first] = self._tower.parts_of(torch.from_numpy(tiles[number]))
                    next(work)
                    self._go_on(item, first)
                    continue
                *_, rows = self._tower.parts_of(torch.from_numpy(tiles[number]))
                assert rows is not None
                self._store(blocks, rows)

    def _go_on(self, item: Encode, first_row: int) -> None:
        """Do parts of the work on a tile, which keeps its activations between them."""
        work = self._begun[first_row]
        for _ in range(item.num_parts):
            rows = next(work)
            if rows is not None:
                self._store(np.frombuffer(item.blocks, dtype=np.int32).tolist() or [first_row], rows)
                del self._begun[first_row]

    def _store(self, blocks: Sequence[int], rows: torch.Tensor) -> None:
        """Write the rows of a tile into its blocks."""
        for block, part in zip(blocks, rows.split(self._tower.spec.rows_per_tile), strict=True):
            self.rows[block : block + len(part)] = part

    def failure(self, rows: Int64s) -> str | None:
        """Why some of these rows could not be computed; None: nothing is known against them."""
        per_tile = self._tower.spec.rows_per_tile
        for first, reason in self._failures.items():
            if ((rows >= first) & (rows < first + per_tile)).any():
                return reason
        return None

    def _read(self, item: Encode) -> npt.NDArray[np.uint8] | str:
        """The tiles of an encode, or why they cannot be read."""
        spec, (_, height, width, colors) = self._tower.spec, item.shape
        side = spec.row_pixels or spec.image_size
        fits = height % side == width % side == 0 if spec.row_pixels else height == width == side
        if not fits or colors != 3:
            logger.error("an image has tiles of another size than the tower: %s %s", item.pixels, item.shape)
            multiples = "multiples of " if spec.row_pixels else ""
            needs = f"{multiples}{(side, side, 3)}"
            return f"the tiles of an image have the shape {item.shape[1:]}, but the model needs {needs}"
        try:
            tiles = np.memmap(item.pixels, dtype=np.uint8, mode="r", shape=item.shape)
            return np.array(tiles[item.first_tile : item.first_tile + item.num_tiles])
        except (OSError, ValueError) as error:
            logger.error("an image cannot be read: %s: %s", item.pixels, error)
            return f"the pixels of an image are not there any more ({type(error).__name__}); send the request again"
