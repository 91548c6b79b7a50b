"""Which replica takes a request: round-robin, least-loaded, prefix-affinity."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from ..runtime.errors import ConfigError
from .sim_request import TOKEN_ID_BYTES, SimRequest
from .simulated_engine import SimulatedEngine

BLOCK_TOKENS: Final = 256
"""Prefixes are remembered in blocks of so many tokens."""
MAX_BLOCKS: Final = 1 << 18
"""Blocks that are remembered; the least recently used ones go first."""
MAX_RATIO: Final = 1.5
MAX_EXCESS: Final = 32
"""Affinity gives way where a replica has this times, and so many requests more than, the least loaded one."""


class DispatchRule(Protocol):
    """Chooses among replicas that still take requests."""

    def choose(self, request: SimRequest, replicas: Sequence[SimulatedEngine]) -> int:
        """Index of the replica."""
        ...


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._next = -1

    def choose(self, request: SimRequest, replicas: Sequence[SimulatedEngine]) -> int:
        self._next = (self._next + 1) % len(replicas)
        return self._next


class LeastLoaded:
    """Whoever has the fewest requests, queued or running."""

    def choose(self, request: SimRequest, replicas: Sequence[SimulatedEngine]) -> int:
        loads = [replica.num_outstanding for replica in replicas]
        return loads.index(min(loads))


class PrefixAffinity:
    """Whoever was sent the longest beginning of the prompt last, unless it has much more to do than others.

    Cache-aware routing as in SGLang's router, with a table of hashed blocks in place of a tree per replica.
    """

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, int] = OrderedDict()  # hash of a prefix -> replica

    def choose(self, request: SimRequest, replicas: Sequence[SimulatedEngine]) -> int:
        hashes = _prefix_hashes(request)
        loads = [replica.num_outstanding for replica in replicas]
        least = min(loads)
        blocks = self._blocks
        chosen = next((blocks[each] for each in reversed(hashes) if each in blocks), -1)
        if chosen < 0 or loads[chosen] > max(MAX_RATIO * least, least + MAX_EXCESS):
            chosen = loads.index(least)
        for each in hashes:
            blocks[each] = chosen
            blocks.move_to_end(each)
        while len(blocks) > MAX_BLOCKS:
            blocks.popitem(last=False)
        return chosen


DISPATCH_RULES: Final[dict[str, Callable[[], DispatchRule]]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-affinity": PrefixAffinity,
}


def make_dispatch_rule(name: str) -> DispatchRule:
    """The rule of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in DISPATCH_RULES:
        raise ConfigError(f"--dispatch is {name!r}, but it must be one of {', '.join(DISPATCH_RULES)}")
    return DISPATCH_RULES[name]()


def _prefix_hashes(request: SimRequest) -> list[int]:
    """One hash per prefix of whole blocks, each made of the one before.

    crc32 and not `hash`: Python's own is salted per process, and equal runs shall give equal reports.
    """
    value = 0
    view = memoryview(request.input_ids)
    step = BLOCK_TOKENS * TOKEN_ID_BYTES
    hashes: list[int] = []
    for start in range(0, len(view) - step + 1, step):
        value = zlib.crc32(view[start : start + step], value)
        hashes.append(value << 20 | start // step)
    return hashes
