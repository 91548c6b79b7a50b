"""`LabelGroups`: the input of questions, kept in the prefix cache from its first question to its last.

The prompts of a call for probabilities of labels begin alike (`PoolingParams.shared_len`). One request computes that
beginning, the others wait for it, and each ends with the step that computes its rest. Between two of them no request
leases the beginning, and the pages of a prompt that is unlikely to be repeated are evicted first. So the group wants
it, as waiting requests do, from its computation until its last request ends: eviction takes it after all that no
request wants. It is no lease: pages that cannot be evicted would be held by requests that wait, and a running request
could have to end for them.
"""

from __future__ import annotations

from typing import NamedTuple

from ..arrays import TOKEN_ID_BYTES
from ..prefix_cache.base import PrefixCache
from ..requests.req import Req


class _Group(NamedTuple):
    """The unfinished requests with one beginning, by arrival number; `seq` is below that of any request."""

    seq: int
    members: set[int]


class LabelGroups:
    """The groups, by namespace and beginning."""

    def __init__(self, cache: PrefixCache, page_size: int) -> None:
        self._cache = cache
        self._page_size = page_size
        self._groups: dict[tuple[str, bytes], _Group] = {}
        self._num_groups = 0

    def __len__(self) -> int:
        return len(self._groups)

    def joined(self, req: Req) -> None:
        """A request has arrived, or has come back to the queue."""
        group = self._groups.get(_key(req))
        if group is None:
            self._num_groups += 1
            group = self._groups[_key(req)] = _Group(-self._num_groups, set())
        group.members.add(req.seq)
        req.call = group.seq

    def computed(self, req: Req) -> None:
        """A member has put its pages into the cache and left its row."""
        if (group := self._groups.get(_key(req))) is not None:
            match = self._cache.match(req.extra_key, req.fill_ids, req.shared_len // self._page_size)
            self._cache.want(group.seq, match, 0)

    def left(self, req: Req) -> None:
        """A member has ended; with the last one the group ends."""
        group = self._groups.get(_key(req))
        if group is None:  # it never was in the queue, or is one of the background
            return
        group.members.discard(req.seq)
        if not group.members:
            self._cache.unwant(group.seq)
            del self._groups[_key(req)]


def _key(req: Req) -> tuple[str, bytes]:
    return req.extra_key, req.fill_ids[: req.shared_len * TOKEN_ID_BYTES]
