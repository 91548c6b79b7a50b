"""`RowMemory`: the memory of the pool's rows: lengths and token ids, KV pages, and pages on the host."""

from __future__ import annotations

from dataclasses import dataclass

from ..requests.row_states import RowStates
from .kv_memory import KVMemory
from .req_to_token_pool import ReqToTokenPool
from .swap_pool import SwapPool


@dataclass(frozen=True, slots=True)
class RowMemory:
    """Four parts that describe the same rows; most users need more than one of them.

    Attributes:
        states: lengths and token ids, by row.
        pool: the rows, and the pages of each.
        kv: gives pages to rows and takes them back.
        host: pages of swapped requests.
    """

    states: RowStates
    pool: ReqToTokenPool
    kv: KVMemory
    host: SwapPool
