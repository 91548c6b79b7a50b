"""`TileBudget`: the work on tiles of images that one step may do beside its decodes."""

from __future__ import annotations

import math

from ..requests.prompt_images import PromptTile
from ..requests.req import Req
from ..step_size.step_target import PromptTime
from .encoder_cache import EncoderCache, PlannedTile, TileKey


class TileBudget:
    """The work on tiles that one step may do: as much as the time of its prompts allows. Made anew for each pass.

    While the time is limited, a tile is worked on in parts, over several steps if need be, and a chunk ends before a
    tile that is not encoded then. A step that has none of this work may always do one part, so that images make
    progress: that part does not count against the time of other prompts, which cost little in a step that is long
    anyway. Tiles of waiting requests are begun without a promise (`ahead`), and the request starts when its first page
    can be computed.
    """

    def __init__(self, cache: EncoderCache, time: PromptTime, page_size: int) -> None:
        self._cache = cache
        self._time = time
        self._page_size = page_size

    def most_tokens(self, req: Req, start: int, limit: int) -> int:
        """The longest run from position `start` on, up to `limit`, whose tiles are encoded or may be in this step."""
        if req.images is None:
            return limit
        if req.images.tiles[-1].end > start or self._cache.planned:
            limit = min(limit, self._time.most_tokens_with_tiles(start))
        num_parts, pixels, seen = 0, 0.0, set[TileKey]()
        for tile in req.images.tiles:
            if tile.end <= start:
                continue
            if tile.start >= start + limit:
                break
            left = self._cache.parts_left(tile)
            if not left or tile.key in seen:
                continue
            num_parts, pixels = num_parts + left, pixels + left * self._part_pixels(tile)
            is_free = num_parts == 1 and not self._cache.planned
            if not is_free and not self._time.has_tiles(pixels, start, tile.end - start):
                return max(0, tile.start - start)
            seen.add(tile.key)
        return limit

    def are_ready(self, req: Req, start: int, length: int) -> bool:
        """Whether the tiles that `length` tokens from position `start` on need are encoded, or time is no limit."""
        if req.images is None or self._time.tiles_s == math.inf:
            return True
        needed = [tile for tile in req.images.tiles if start < tile.end and tile.start < start + length]
        return not any(self._cache.parts_left(tile) for tile in needed)

    def spend(self, req: Req, start: int, length: int) -> None:
        """Plan the tiles that `length` tokens from position `start` on need, and work ahead on the next one."""
        if req.images is None:
            return
        end = start + length
        for tile in req.images.tiles:
            if start < tile.end and tile.start < end:
                self._add(req, tile, self._cache.parts_left(tile))
        if req.images.tiles[-1].end > start:
            self._time.spend_beside_tiles(start, length)
        self.ahead(req, end, has_tokens=True)

    def ahead(self, req: Req, end: int, *, has_tokens: bool = False) -> None:
        """Work on the tile that keeps a prompt from advancing from position `end` on, if there is one.

        `has_tokens`: the step computes tokens of the prompt, so it need not do work for which there is no time.
        """
        if req.images is None or self._time.tiles_s == math.inf:
            return
        next_cut = req.next_cut(end, self._page_size)
        for tile in req.images.tiles:
            if end < tile.end and tile.start < next_cut and (left := self._cache.parts_left(tile)):
                least = not (self._cache.planned or has_tokens)
                most = int(self._time.most_pixels() / self._part_pixels(tile))
                self._add(req, tile, min(left, max(most, least)))
                return

    def _part_pixels(self, tile: PromptTile) -> float:
        return tile.pixels / self._cache.num_parts(tile)

    def _add(self, req: Req, tile: PromptTile, num_parts: int) -> None:
        if num_parts:
            self._time.spend_pixels(num_parts * self._part_pixels(tile))
            planned = self._cache.planned.get(tile.key)
            so_far = 0 if planned is None else planned.num_parts
            self._cache.planned[tile.key] = PlannedTile(tile, req, so_far + num_parts)
