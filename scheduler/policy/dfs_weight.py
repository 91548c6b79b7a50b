"""`DfsWeight`: along the prefix tree, so that requests which share a prefix run together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Protocol

from ..prefix_cache.base import PrefixMatch
from ..requests.req import Req
from ..requests.requests import WaitingQueue
from .base import MAX_SORTED, PolicyParts, SchedulePolicy, overtaken_first


class TreeNode(Protocol):
    """The required interface of a prefix tree node: a parent, and a hash."""

    @property
    def parent(self) -> TreeNode | None:
        """The parent node; None for a root."""
        ...

    def __hash__(self) -> int: ...


class DfsWeight(SchedulePolicy):
    """Depth first through the tree of cached prefixes; at each node the child with the most waiting requests first.

    Requests that end at a node come after those below it, longer matches first. Requests without a cached prefix come
    last, by arrival. `lpm` alternates between branches with equally long matches; this policy finishes one branch
    before the next, so that a prefix is evicted only after all requests waiting for it have used it. A request that was
    overtaken in `MAX_OVERTAKEN` passes comes before all others. Above `MAX_SORTED` waiting requests the order is
    `fcfs`. Source: SGLang's policy of the same name.
    """

    name = "dfs-weight"

    def __init__(self, parts: PolicyParts) -> None:
        self._matches = parts.matches

    def order(self, waiting: WaitingQueue, now_s: float) -> Iterable[Req]:
        if len(waiting) > MAX_SORTED:
            return waiting
        reqs = list(waiting)
        found = list(zip(reqs, self._matches(reqs), strict=True))
        matched = [(req, match) for req, match in found if match.num_pages]
        unmatched = [req for req, match in found if not match.num_pages]
        return overtaken_first(waiting, [*_depth_first(matched), *unmatched])


def _depth_first(matched: list[tuple[Req, PrefixMatch]]) -> Iterator[Req]:
    weights: Counter[TreeNode] = Counter()
    children: dict[TreeNode | None, list[TreeNode]] = {}
    ends: dict[TreeNode, list[tuple[Req, PrefixMatch]]] = {}
    for req, match in matched:
        assert match.node is not None
        ends.setdefault(match.node, []).append((req, match))
    for end, at_end in ends.items():  # per node and not per request: the path to the root may be long
        above: TreeNode | None = end
        while above is not None:
            if above not in weights:
                children.setdefault(above.parent, []).append(above)
            weights[above] += len(at_end)
            above = above.parent

    # A stack and not recursion: a long conversation is a deep path. A node is pushed again, to be left, before its
    # children are pushed.
    stack: list[tuple[TreeNode, bool]] = []

    def enter(parent: TreeNode | None) -> None:
        heaviest_first = sorted(children.get(parent, []), key=lambda child: -weights[child])
        stack.extend((child, False) for child in reversed(heaviest_first))

    enter(None)
    while stack:
        node, seen = stack.pop()
        if seen:
            at_node = sorted(ends.get(node, []), key=lambda each: -each[1].pages_in_node)
            yield from (req for req, _ in at_node)
        else:
            stack.append((node, True))
            enter(node)
