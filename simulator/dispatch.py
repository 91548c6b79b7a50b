"""Choice of the replica for a request: round-robin, least-loaded, prefix-affinity."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from ..runtime.errors import ConfigError
from .sim_request import TOKEN_ID_BYTES, SimRequest
from .simulated_engine import SimulatedEngine

BLOCK_TOKENS: Final = 256
"""Prefixes are recorded in blocks of this many tokens."""
MAX_BLOCKS: Final = 1 << 18
"""Recorded blocks; the least recently used ones are dropped first."""
MAX_RATIO: Final = 1.5
MAX_EXCESS: Final = 32
"""Affinity does not apply if a replica has this many times, and this many requests more than, the least loaded one."""


class DispatchRule(Protocol):
    """Chooses among replicas that still accept requests."""

    def choose(self, request: SimRequest, replicas: Sequence[SimulatedEngine]) -> int:
        """Index of the replica."""
        ...


class RoundRobin:
    """The replicas in turn."""

    def __init__(self) -> None:
        self._next = -1

    def choose(self, request: SimRequest, replicas: Sequence[SimulatedEngine]) -> int:
        self._next = (self._next + 1) % len(replicas)
        return self._next


class LeastLoaded:
    """The replica with the fewest requests, queued or running."""

    def choose(self, request: SimRequest, replicas: Sequence[SimulatedEngine]) -> int:
        loads = [replica.num_outstanding for replica in replicas]
        return loads.index(min(loads))


class PrefixAffinity:
    """The replica that last received the longest prefix of the prompt, unless its load is much higher than the least.

    Cache-aware routing as in SGLang's router, with a table of hashed blocks instead of a tree per replica.
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
    """One hash per prefix of whole blocks, each computed from the one before.

    It uses crc32 because `hash` is salted per process, and equal runs must give equal reports.
    """
    value = 0
    view = memoryview(request.input_ids)
    step = BLOCK_TOKENS * TOKEN_ID_BYTES
    hashes: list[int] = []
    for start in range(0, len(view) - step + 1, step):
        value = zlib.crc32(view[start : start + step], value)
        hashes.append(value << 20 | start // step)
    return hashes
