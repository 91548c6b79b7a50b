"""`RandomOrder`: no order at all, as a baseline, and to find out what depends on the order."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from ..requests.req import Req
from ..requests.waiting_queue import WaitingQueue
from .ageing import overtaken_first
from .static_order import StaticOrder


class RandomOrder(StaticOrder):
    """By a hash of the seed and the number of arrival; who was overtaken too often before everybody.

    A request keeps its place while it waits, also over a retraction: the order is drawn once per request, not once
    per pass, so equal runs decide equally and a pass need not shuffle ten thousand requests.
    """

    name = "random"

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = str(seed).encode()

    def key(self, req: Req) -> float:
        digest = hashlib.blake2b(struct.pack("<q", req.seq), digest_size=6, key=self._seed[:64]).digest()
        return int.from_bytes(digest, "little")

    def order(self, waiting: WaitingQueue, now_s: float) -> Iterable[Req]:
        return overtaken_first(waiting, self._index)
