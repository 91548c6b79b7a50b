"""`EncoderCache`: the rows of the encoder's buffer in the runner: which tile of an image has which, and until when.

A tile is encoded before the step, or in the step, that first reads its rows; its work may be divided among steps. Rows
are given out by blocks of the size of a tile, so nothing fragments. The unit of the cache is a tile, by the digest of
its image and its number: a request that needs the end of an image, because the prefix cache has the beginning, takes
only the rows of the rest. Where an image is one tile of any size, its rows are in several blocks, which need not be
consecutive. A tile is

    free      it has no owner
    promised  a request was admitted that will read it, and it is not encoded yet
    used      it is encoded, and a request will read it
    idle      it is encoded, or begun, and no request with a row needs it: kept for the next request with the same
              image, and given away when rows are short, the longest idle one first

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

from ...runtime.scheduler_report import EncoderFigures
from ...runtime.step_plan import Encode
from ..memory.pages import LedgerError
from ..records.verdict import AddReqResult, Reason, Verdict
from ..requests.prompt_images import PromptTile
from ..requests.req import Chunk, Req

TileKey = tuple[bytes, int]


class _Tile:
    """An owner of blocks of rows, in order.

    `users`: places in prompts that will read them; `num_parts`: of its work that are planned.
    """

    __slots__ = ("is_encoded", "key", "num_parts", "slots", "users")

    def __init__(self, key: TileKey, slots: list[int]) -> None:
        self.key = key
        self.slots = slots
        self.users = self.num_parts = 0
        self.is_encoded = False


class PlannedTile(NamedTuple):
    """A tile on which a step works, for the request `req`, and the number of parts of that work."""

    wants: PromptTile
    req: Req
    num_parts: int


class EncodeWork(NamedTuple):
    """The part of a step that concerns images.

    Attributes:
        encodes: see `StepPlan`.
        placements: [n, 3] int32 for each request that starts with images: `NewReq.media`.
        num_tiles: tiles of which the last part is planned, by the rid of the request that needs them first.
        pixels: of tiles, counted in proportion to the parts of the work on them, by the request that needs them first.
    """

    encodes: tuple[Encode, ...] = ()
    placements: dict[str, bytes] = {}  # noqa: RUF012
    num_tiles: dict[str, int] = {}  # noqa: RUF012
    pixels: dict[Req, float] = {}  # noqa: RUF012


NO_ENCODE_WORK = EncodeWork()


class EncoderCache:
    """See the module. Admission asks it; a `RowObserver`.

    Attributes:
        hits_total: tiles that requests found encoded when they were admitted.
        encoded_total: tiles that were encoded.
        planned: the tiles on which the step of this pass works; `TileBudget` fills it, a pass and `plan` empty it.
    """

    def __init__(self, num_rows: int, tile_rows: int, tile_parts: int = 1) -> None:
        """Start with all rows free.

        Args:
            num_rows: of the buffer, a multiple of `tile_rows`; 0: the model takes no images.
            tile_rows: of each tile, or of a block of rows.
            tile_parts: steps among which the work on a tile, or on a block of rows, can be divided.
        """
        self.planned: dict[TileKey, PlannedTile] = {}
        self._tile_parts = tile_parts
        self._tile_rows = tile_rows
        self.num_blocks = num_rows // tile_rows if tile_rows else 0
        self._free = list(range(self.num_blocks - 1, -1, -1))
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
        wanted = {tile.key: tile.num_blocks for tile in req.images.tiles if tile.end > ready_len}
        need = sum(num for key, num in wanted.items() if key not in self._tiles)
        have = len(self._free) + self._blocks_of(key for key in self._idle if key not in wanted)
        if need <= have:
            return None
        limit, rows = Reason.MEDIA_LIMIT, self._tile_rows
        return Verdict(req.rid, AddReqResult.NO_TOKEN, limit, ready_len, need=need * rows, have=have * rows)

    def has_rows(self, req: Req) -> bool:
        """Whether rows are promised to a request, or hold what it will read."""
        return bool(self._needs.get(req))

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
                found = self._tiles[wants.key] = _Tile(wants.key, self._take_slots(wants.num_blocks))
            self.hits_total += found.is_encoded
            found.users += 1
            needs.append((wants, found))

    def _take_slots(self, num: int) -> list[int]:
        while len(self._free) < num:
            key, _ = self._idle.popitem(last=False)
            self._drop(self._tiles[key])
        return [self._free.pop() for _ in range(num)]

    def _blocks_of(self, keys: Iterable[TileKey]) -> int:
        return sum(len(self._tiles[key].slots) for key in keys)

    def started(self, req: Req) -> None:
        pass

    def stopped(self, req: Req) -> None:
        for _, tile in self._needs.pop(req, ()):
            self._release(tile)

    def _release(self, tile: _Tile) -> None:
        tile.users -= 1
        if tile.users:
            return
        if tile.num_parts:
            self._idle[tile.key] = None
        else:
            self._drop(tile)

    def _drop(self, tile: _Tile) -> None:
        del self._tiles[tile.key]
        self._free += reversed(tile.slots)

    # ------------------------------------------------------------ steps

    def num_parts(self, tile: PromptTile) -> int:
        """Parts into which the work on a tile can be divided."""
        return self._tile_parts * tile.num_blocks

    def parts_left(self, wants: PromptTile) -> int:
        """Parts of the work on a tile that neither an earlier step nor this one does; 0: its rows can be read."""
        tile, planned = self._tiles.get(wants.key), self.planned.get(wants.key)
        left = self.num_parts(wants) - (0 if tile is None else tile.num_parts)
        return left if planned is None else left - planned.num_parts

    def plan(self, step_id: int, chunks: Sequence[Chunk]) -> EncodeWork:
        """Plan the work on tiles, and give back those that no later chunk reads; once per step."""
        if not (self._needs or self.planned):
            return NO_ENCODE_WORK
        placements = {
            chunk.req.rid: self._placement(self._needs[chunk.req])
            for chunk in chunks
            if chunk.is_first and chunk.req in self._needs
        }
        encodes: list[Encode] = []
        num_tiles: dict[str, int] = {}
        pixels: dict[Req, float] = {}
        ahead: Req | None = None  # the first request for which the step works ahead
        for key, (wants, req, num_parts) in self.planned.items():
            tile = self._tiles.get(key)
            if tile is None or not tile.users:
                ahead = ahead or req
                tile = tile or self._begin_ahead(wants, req, may_evict=req is ahead)
            if tile is None:
                continue
            of_tile = self.num_parts(wants)
            num_parts = min(num_parts, of_tile - tile.num_parts)
            self._add_encode(encodes, wants, tile, num_parts)
            pixels[req] = pixels.get(req, 0.0) + wants.pixels * num_parts / of_tile
            tile.num_parts += num_parts
            tile.is_encoded = tile.num_parts == of_tile
            if tile.is_encoded:
                num_tiles[req.rid] = num_tiles.get(req.rid, 0) + 1
            self._in_flight.setdefault(step_id, []).append(tile)
        self.planned = {}
        self.encoded_total += sum(num_tiles.values())
        for chunk in chunks:
            self._give_back(chunk.req, chunk.start + chunk.length)
        return EncodeWork(tuple(encodes), placements, num_tiles, pixels)

    def _begin_ahead(self, wants: PromptTile, req: Req, *, may_evict: bool) -> _Tile | None:
        """Rows for a tile of a request that waits for it; None: there are none.

        Only the first such request of a step evicts, and no tile that it may need. Else two requests could evict each
        other's tiles forever, and none of them would start.
        """
        key, num = wants.key, wants.num_blocks
        if len(self._free) < num:
            own = {tile.key for tile in req.images.tiles} if req.images is not None else set()
            idle = [each for each in self._idle if each not in self.planned and each not in own]
            if not may_evict or len(self._free) + self._blocks_of(idle) < num:
                return None
            while len(self._free) < num:
                spare = idle.pop(0)
                del self._idle[spare]
                self._drop(self._tiles[spare])
        tile = self._tiles[key] = _Tile(key, self._take_slots(num))
        self._idle[key] = None
        return tile

    def _give_back(self, req: Req, end: int) -> None:
        """Give back the tiles before position `end`."""
        needs = self._needs.get(req)
        while needs and needs[0][0].end <= end:
            self._release(needs.popleft()[1])
        if needs is not None and not needs:
            del self._needs[req]

    def _placement(self, needs: Iterable[tuple[PromptTile, _Tile]]) -> bytes:
        spans, size = [], self._tile_rows
        for wants, tile in needs:
            for position, length, first_row in wants.spans:
                end = position + length
                while position < end:  # cut where blocks end
                    number, offset = divmod(first_row, size)
                    count = min(end - position, size - offset)
                    spans.append((position, count, tile.slots[number] * size + offset))
                    position, first_row = position + count, first_row + count
        spans.sort()  # tiles of an image may alternate
        return np.array(spans, dtype=np.int32).tobytes()

    def _add_encode(self, encodes: list[Encode], wants: PromptTile, tile: _Tile, num_parts: int) -> None:
        """Add work on a tile; whole tiles that follow each other in image and buffer are one `Encode`."""
        firsts = np.array(tile.slots, dtype=np.int32) * self._tile_rows
        item, number, first_row = wants.item, wants.number, int(firsts[0])
        blocks = firsts.tobytes() if len(firsts) > 1 else b""
        if num_parts < self.num_parts(wants):
            parts = (tile.num_parts, num_parts)
            encodes.append(Encode(item.pixels, item.shape, number, 1, first_row, *parts, blocks))
            return
        if encodes and not encodes[-1].num_parts:
            last = encodes[-1]
            follows = (last.pixels, last.first_tile + last.num_tiles) == (item.pixels, number)
            if follows and last.first_row + last.num_tiles * self._tile_rows == first_row:
                encodes[-1] = Encode(
                    item.pixels, item.shape, last.first_tile, last.num_tiles + 1, last.first_row
                )
                return
        encodes.append(Encode(item.pixels, item.shape, number, 1, first_row, blocks=blocks))

    def settled(self, step_id: int, failed: Sequence[Req], *, out_of_memory: bool = False) -> None:
        """A step is settled. If it ran `out_of_memory` or requests of it `failed`, its tiles count as not encoded.

        So do all tiles of these requests: a tile that an earlier step could not read fails only where it is read. No
        other step has read those of this one: a step that encodes is settled before the next one is planned
        (`Scheduler.needs_result`).
        """
        tiles = self._in_flight.pop(step_id, ()) if self._in_flight else ()
        for tile in tiles if failed or out_of_memory else ():
            self._not_encoded(tile)
        for req in failed:
            for wants in () if req.images is None else req.images.tiles:
                if (found := self._tiles.get(wants.key)) is not None:
                    self._not_encoded(found)

    def _not_encoded(self, tile: _Tile) -> None:
        if self._tiles.get(tile.key) is not tile:
            return  # its rows were given away
        tile.is_encoded, tile.num_parts = False, 0
        if not tile.users:
            del self._idle[tile.key]
            self._drop(tile)

    def flush(self) -> None:
        """Forget the tiles that no request needs."""
        for key in [*self._idle]:
            del self._idle[key]
            self._drop(self._tiles[key])

    @property
    def figures(self) -> EncoderFigures:
        """Rows by state."""
        idle, blocks = self._blocks_of(self._idle), self.num_blocks
        used = blocks - len(self._free) - idle
        return EncoderFigures(*(num * self._tile_rows for num in (used, idle, blocks)))

    # ------------------------------------------------------------ checks

    def check(self) -> None:
        """Check the row equation.

        Raises:
            LedgerError: rows are missing or counted twice.
        """
        free, idle, used, promised = len(self._free), self._blocks_of(self._idle), 0, 0
        for tile in self._tiles.values():
            used += len(tile.slots) * (tile.users > 0 and tile.is_encoded)
            promised += len(tile.slots) * (tile.users > 0 and not tile.is_encoded)
        if free + idle + used + promised != self.num_blocks:
            raise LedgerError(
                f"row equation: free {free} + idle {idle} + used {used} + promised {promised} = "
                f"{free + idle + used + promised}, but the encoder's buffer has {self.num_blocks} blocks of rows"
            )

    def check_idle(self) -> None:
        """Check that without requests no rows are used or promised.

        Raises:
            LedgerError: some are.
        """
        self.check()
        taken = self.num_blocks - len(self._free) - self._blocks_of(self._idle)
        if self._needs or taken:
            raise LedgerError(
                f"no request is left, but {taken} blocks of rows are used or promised, for "
                f"{[req.rid for req in self._needs]}"
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
        slots = [*self._free, *(slot for tile in self._tiles.values() for slot in tile.slots)]
        if sorted(slots) != list(range(self.num_blocks)):
            raise LedgerError(f"blocks of rows with an owner, in order: {sorted(slots)}")
        for key, tile in self._tiles.items():
            if tile.users != users[key] or (key in self._idle) != (not tile.users):
                raise LedgerError(
                    f"tile {key[1]} of {key[0].hex()[:8]}: {tile.users} users, {users[key]} of them known, "
                    f"{'idle' if key in self._idle else 'not idle'}"
                )
