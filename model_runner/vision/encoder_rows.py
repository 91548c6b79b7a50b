"""`EncoderRows`: the buffer with the rows of tiles, which the scheduler assigns, and the tower that fills it.

`StepPlan.encodes` names the rows, and `NewReq.media` the positions of a prompt that take them. A tile that cannot be
read becomes rows of NaN, so every request with the image ends with an error, and no other one does.
"""

# Shapes: R rows of the buffer, K hidden size of the language model, T new tokens in the batch.

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from ...runtime.step_plan import Encode
    from .tower import Tower

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


class EncoderRows:
    """See the module.

    Attributes:
        rows: [R, K] in the serving dtype.
    """

    def __init__(self, tower: Tower, num_rows: int, size: int, device: torch.device) -> None:
        """`size`: K."""
        self.rows = torch.zeros((num_rows, size), dtype=tower.dtype, device=device)
        self._tower = tower
        self._failures: dict[int, str] = {}  # by the first row of a tile
        self._begun: dict[
            int, Iterator[torch.Tensor | None]
        ] = {}  # the same: work of which other steps do the rest

    def encode(self, encodes: Sequence[Encode]) -> None:
        """Compute the rows of tiles, one tile after the other, or do parts of that."""
        per_tile = self._tower.spec.rows_per_tile
        for item in encodes:
            if item.first_part:
                if item.first_row in self._begun:  # else it could not be read when it was begun
                    self._go_on(item.first_row, item.num_parts)
                continue
            tiles = self._read(item)
            for number in range(item.num_tiles):
                first = item.first_row + number * per_tile
                self._begun.pop(first, None)  # work on a tile that has lost its rows
                if isinstance(tiles, str):
                    self.rows[first : first + per_tile] = float("nan")
                    self._failures[first] = tiles
                    continue
                self._failures.pop(first, None)
                if item.num_parts:
                    self._begun[first] = self._tower.parts_of(torch.from_numpy(tiles[number]))
                    self._go_on(first, item.num_parts)
                    continue
                self.rows[first : first + per_tile] = self._tower.encode(torch.from_numpy(tiles[number]))

    def _go_on(self, first_row: int, num_parts: int) -> None:
        """Do parts of the work on a tile, which keeps its activations between them."""
        work, per_tile = self._begun[first_row], self._tower.spec.rows_per_tile
        for _ in range(num_parts):
            rows = next(work)
            if rows is not None:
                self.rows[first_row : first_row + per_tile] = rows
                del self._begun[first_row]

    def failure(self, rows: Int64s) -> str | None:
        """Why some of these rows could not be computed; None: nothing is known against them."""
        per_tile = self._tower.spec.rows_per_tile
        for first, reason in self._failures.items():
            if ((rows >= first) & (rows < first + per_tile)).any():
                return reason
        return None

    def _read(self, item: Encode) -> npt.NDArray[np.uint8] | str:
        """The tiles of an encode, or why they cannot be read."""
        side = self._tower.spec.image_size
        if item.shape[1:] != (side, side, 3):
            logger.error("an image has tiles of another size than the tower: %s %s", item.pixels, item.shape)
            return f"the tiles of an image have the shape {item.shape[1:]}, but the model needs {(side, side, 3)}"
        try:
            tiles = np.memmap(item.pixels, dtype=np.uint8, mode="r", shape=item.shape)
            return np.array(tiles[item.first_tile : item.first_tile + item.num_tiles])
        except (OSError, ValueError) as error:
            logger.error("an image cannot be read: %s: %s", item.pixels, error)
            return f"the pixels of an image are not there any more ({type(error).__name__}); send the request again"
