"""`EncoderCache`: the rows of the encoder's buffer in the runner: which tile of an image has which, and until when.

A tile is encoded before the step, or in the step, that first reads its rows. Rows are given out by whole tiles, so
nothing fragments. The unit of the cache is a tile, by the digest of its image and its number: a request that needs the
end of an image, because the prefix cache has the beginning, takes only the rows of the rest. A tile is

    free      it has no owner
    promised  a request was admitted that will read it, and it is not encoded yet
    used      it is encoded, and a request will read it
    idle      it is encoded, and no request needs it: kept for the next request with the same image, and given away
              when rows are short, the longest idle one first

    free + idle + used + promised == total

All rows that a request will read are promised when it is admitted, or it waits (MEDIA_LIMIT): the runner gets them with
the `NewReq`. A request gives a tile back when the chunk that reads its last row is planned; the rest when it ends or is
retracted. A tile that is given away is overwritten by a later plan, and the runner executes plans in order. vLLM's
`encoder_cache_manager` has the idea; there an image is the unit, and rows are taken by each chunk.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ...runtime.step_plan import Encode
from ..memory.pages import LedgerError
from ..records.verdict import AddReqResult, Reason, Verdict
from ..requests.prompt_images import PromptTile
from ..requests.req import Chunk, Req
from ..step_size.step_target import PromptTime

TileKey = tuple[bytes, int]


class _Tile:
    """An owner of rows; `users`: places in prompts that will read them."""

    __slots__ = ("is_encoded", "key", "slot", "users")

    def __init__(self, key: TileKey, slot: int) -> None:
        self.key = key
        self.slot = slot
        self.users = 0
        self.is_encoded = False


class EncodeWork(NamedTuple):
    """The part of a step that concerns images.

    Attributes:
        encodes: see `StepPlan`.
        placements: [n, 3] int32 for each request that starts with images: `NewReq.media`.
        num_tiles: tiles that are encoded, by the rid of the request that needs them first.
    """

    encodes: tuple[Encode, ...] = ()
    placements: dict[str, bytes] = {}  # noqa: RUF012
    num_tiles: dict[str, int] = {}  # noqa: RUF012


NO_ENCODE_WORK = EncodeWork()


class EncoderCache:
    """See the module. Admission asks it; a `RowObserver`.

    Attributes:
        hits_total: tiles that requests found encoded when they were admitted.
        encoded_total: tiles that were encoded.
    """

    def __init__(self, num_rows: int, tile_rows: int) -> None:
        """Start with all rows free.

        Args:
            num_rows: of the buffer, a multiple of `tile_rows`; 0: the model takes no images.
            tile_rows: of each tile.
        """
        self._tile_rows = tile_rows
        self.num_tiles = num_rows // tile_rows if tile_rows else 0
        self._free = list(range(self.num_tiles - 1, -1, -1))
        self._tiles: dict[TileKey, _Tile] = {}
        self._idle: OrderedDict[TileKey, None] = OrderedDict()  # the longest idle first
        self._needs: dict[Req, deque[tuple[PromptTile, _Tile]]] = {}  # in order of position
        self._in_flight: dict[int, list[_Tile]] = {}  # by step, what it encodes
        self.hits_total = self.encoded_total = 0

    # ------------------------------------------------------------ admission

    def refusal(self, req: Req, ready_len: int) -> Verdict | None:
        """Reason why a request cannot start now; None if it can.

        Args:
            req: waits for a row.
            ready_len: tokens that need not be computed.
        """
        if req.images is None:
            return None
        wanted = {tile.key for tile in req.images.tiles if tile.end > ready_len}
        need = len(wanted - self._tiles.keys())
        have = len(self._free) + len(self._idle) - len(wanted & self._idle.keys())
        if need <= have:
            return None
        limit, rows = Reason.MEDIA_LIMIT, self._tile_rows
        return Verdict(req.rid, AddReqResult.NO_TOKEN, limit, ready_len, need=need * rows, have=have * rows)

    def admitted(self, req: Req, ready_len: int) -> None:
        """Promise a request its rows; call when `refusal` is None."""
        if req.images is None:
            return
        wanted = [tile for tile in req.images.tiles if tile.end > ready_len]
        for tile in wanted:  # first: they must not be given away for the others
            self._idle.pop(tile.key, None)
        needs = self._needs[req] = deque()
        for wants in wanted:
            found = self._tiles.get(wants.key)
            if found is None:
                found = self._tiles[wants.key] = _Tile(wants.key, self._take_slot())
            self.hits_total += found.is_encoded
            found.users += 1
            needs.append((wants, found))

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        key, _ = self._idle.popitem(last=False)
        return self._tiles.pop(key).slot

    def started(self, req: Req) -> None:
        pass

    def stopped(self, req: Req) -> None:
        for _, tile in self._needs.pop(req, ()):
            self._release(tile)

    def _release(self, tile: _Tile) -> None:
        tile.users -= 1
        if tile.users:
            return
        if tile.is_encoded:
            self._idle[tile.key] = None
        else:
            self._drop(tile)

    def _drop(self, tile: _Tile) -> None:
        del self._tiles[tile.key]
        self._free.append(tile.slot)

    # ------------------------------------------------------------ steps

    def is_encoded(self, key: TileKey) -> bool:
        """Whether the rows of a tile can be read, in this step or a later one."""
        tile = self._tiles.get(key)
        return tile is not None and tile.is_encoded

    def plan(self, step_id: int, chunks: Sequence[Chunk]) -> EncodeWork:
        """Encode what the prompt chunks of a step read and give back what no later one reads; once per step."""
        if not self._needs:
            return NO_ENCODE_WORK
        encodes: list[Encode] = []
        placements: dict[str, bytes] = {}
        num_tiles: dict[str, int] = {}
        planned: list[_Tile] = []
        for chunk in chunks:
            req, end = chunk.req, chunk.start + chunk.length
            needs = self._needs.get(req, ())
            if needs and chunk.is_first:
                placements[req.rid] = self._placement(needs)
            for wants, tile in needs:
                if wants.start >= end:
                    break
                if not tile.is_encoded:
                    tile.is_encoded = True
                    planned.append(tile)
                    self._add_encode(encodes, wants, tile)
                    num_tiles[req.rid] = num_tiles.get(req.rid, 0) + 1
        if planned:
            self.encoded_total += len(planned)
            self._in_flight[step_id] = planned
        for chunk in chunks:
            self._give_back(chunk.req, chunk.start + chunk.length)
        return EncodeWork(tuple(encodes), placements, num_tiles)

    def _give_back(self, req: Req, end: int) -> None:
        """Give back the tiles before position `end`."""
        needs = self._needs.get(req)
        while needs and needs[0][0].end <= end:
            self._release(needs.popleft()[1])
        if needs is not None and not needs:
            del self._needs[req]

    def _placement(self, needs: Iterable[tuple[PromptTile, _Tile]]) -> bytes:
        spans = [
            (position, length, tile.slot * self._tile_rows + first_row)
            for wants, tile in needs
            for position, length, first_row in wants.spans
        ]
        return np.array(spans, dtype=np.int32).tobytes()

    def _add_encode(self, encodes: list[Encode], wants: PromptTile, tile: _Tile) -> None:
        """Add a tile; tiles that follow each other in the image and in the buffer are one `Encode`."""
        item, number, first_row = wants.item, wants.number, tile.slot * self._tile_rows
        if encodes:
            last = encodes[-1]
            follows = (last.pixels, last.first_tile + last.num_tiles) == (item.pixels, number)
            if follows and last.first_row + last.num_tiles * self._tile_rows == first_row:
                encodes[-1] = Encode(
                    item.pixels, item.shape, last.first_tile, last.num_tiles + 1, last.first_row
                )
                return
        encodes.append(Encode(item.pixels, item.shape, number, 1, first_row))

    def settled(self, step_id: int, *, failed: bool) -> None:
        """A step is settled. If it `failed`, or a request of it, its tiles count as not encoded.

        No other step has read them: a step that encodes is settled before the next one is planned
        (`Scheduler.needs_result`).
        """
        for tile in self._in_flight.pop(step_id, ()) if self._in_flight else ():
            if failed and self._tiles.get(tile.key) is tile:
                tile.is_encoded = False
                if not tile.users:
                    del self._idle[tile.key]
                    self._drop(tile)

    def flush(self) -> None:
        """Forget the tiles that no request needs."""
        for key in [*self._idle]:
            del self._idle[key]
            self._drop(self._tiles[key])

    # ------------------------------------------------------------ checks

    def check(self) -> None:
        """Check the row equation.

        Raises:
            LedgerError: rows are missing or counted twice.
        """
        free, idle = len(self._free), len(self._idle)
        used = sum(tile.users > 0 and tile.is_encoded for tile in self._tiles.values())
        promised = sum(tile.users > 0 and not tile.is_encoded for tile in self._tiles.values())
        if free + idle + used + promised != self.num_tiles:
            raise LedgerError(
                f"row equation: free {free} + idle {idle} + used {used} + promised {promised} = "
                f"{free + idle + used + promised}, but the encoder's buffer has rows for {self.num_tiles} tiles"
            )

    def check_idle(self) -> None:
        """Check that without requests no rows are used or promised.

        Raises:
            LedgerError: some are.
        """
        self.check()
        if self._needs or len(self._free) + len(self._idle) != self.num_tiles:
            raise LedgerError(
                f"no request is left, but {self.num_tiles - len(self._free) - len(self._idle)} tiles are used or "
                f"promised, for {[req.rid for req in self._needs]}"
            )

    def audit(self, with_row: Iterable[Req]) -> None:
        """Check every tile against the requests that have a row. For tests.

        Raises:
            LedgerError: they do not agree.
        """
        self.check()
        if lost := self._needs.keys() - set(with_row):
            raise LedgerError(
                f"rows are promised to {sorted(req.rid for req in lost)}, which have no row of the pool"
            )
        users = Counter(tile.key for needs in self._needs.values() for _, tile in needs)
        slots = [*self._free, *(tile.slot for tile in self._tiles.values())]
        if sorted(slots) != list(range(self.num_tiles)):
            raise LedgerError(f"slots of tiles with an owner, in order: {sorted(slots)}")
        for key, tile in self._tiles.items():
            if tile.users != users[key] or (key in self._idle) != (not tile.users):
                raise LedgerError(
                    f"tile {key[1]} of {key[0].hex()[:8]}: {tile.users} users, {users[key]} of them known, "
                    f"{'idle' if key in self._idle else 'not idle'}"
                )


class TileBudget:
    """The tiles that one step may encode: as many as the time of its prompts allows. Made anew for each pass.

    The first prompt may always encode what its next page needs, so that it makes progress, and at least one tile; these
    tiles do not count against the time of other prompts, which cost little in a step that is long anyway.
    """

    def __init__(self, cache: EncoderCache, time: PromptTime, page_size: int) -> None:
        self._cache = cache
        self._time = time
        self._page_size = page_size
        self._planned: set[TileKey] = set()

    def most_tokens(self, req: Req, start: int, limit: int) -> int:
        """The longest run from position `start` on, up to `limit`, whose tiles are encoded or may be in this step."""
        if req.images is None:
            return limit
        more: set[TileKey] = set()
        for tile in req.images.tiles:
            if tile.end <= start:
                continue
            if tile.start >= start + limit:
                break
            key = tile.key
            if self._cache.is_encoded(key) or key in self._planned or key in more:
                continue
            is_free = not self._planned and self._is_first(tile, start, num_before=len(more))
            if not is_free and not self._time.has_tiles(len(more) + 1, start, tile.end - start):
                return max(0, tile.start - start)
            more.add(key)
        return limit

    def spend(self, req: Req, start: int, length: int) -> None:
        """Count the tiles that `length` tokens from position `start` on need and that are not encoded yet."""
        if req.images is None:
            return
        new = {
            tile.key
            for tile in req.images.tiles
            if start < tile.end and tile.start < start + length and not self._cache.is_encoded(tile.key)
        } - self._planned
        self._time.spend_tiles(len(new))
        self._planned |= new

    def _is_first(self, tile: PromptTile, start: int, num_before: int) -> bool:
        next_page = (start // self._page_size + 1) * self._page_size
        return not num_before or tile.start < next_page
