"""`DfsWeight`: along the prefix tree, so that requests which share a prefix run together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Protocol

from ..req import Req
from ..waiting_queue import WaitingQueue
from .base import MAX_OVERTAKEN, MAX_SORTED, PolicyParts, SchedulePolicy


class TreeNode(Protocol):
    """What is needed of a node of the prefix tree: the way up, and that it can be a key."""

    @property
    def parent(self) -> TreeNode | None:
        """The node before it; None for a root."""
        ...

    def __hash__(self) -> int: ...


class DfsWeight(SchedulePolicy):
    """Depth first through the tree of cached prefixes, at each node into the child with most waiting requests first.

    Requests that end at a node come after those below it, longer matches first; those without a cached prefix come
    last, by arrival. `lpm` jumps between branches whose matches are equally long; this finishes one branch before
    the next, so that a prefix is evicted only when all who waited for it have used it. Who was overtaken too often
    comes before everybody; above 128 waiting it is first come, first served. Idea: SGLang's policy of this name.
    """

    name = "dfs-weight"

    def __init__(self, parts: PolicyParts) -> None:
        self._match = parts.match

    def order(self, waiting: WaitingQueue, now_s: float) -> Iterable[Req]:
        if len(waiting) > MAX_SORTED:
            return waiting
        overtaken = [req for req in waiting if req.num_overtaken >= MAX_OVERTAKEN]
        others = [req for req in waiting if req.num_overtaken < MAX_OVERTAKEN]
        unmatched = [req for req in others if not self._match(req).num_pages]
        matched = [req for req in others if self._match(req).num_pages]
        return [*overtaken, *self._depth_first(matched), *unmatched]

    def _depth_first(self, reqs: list[Req]) -> Iterator[Req]:
        weights: Counter[TreeNode] = Counter()
        children: dict[TreeNode | None, list[TreeNode]] = {}
        ends: dict[TreeNode, list[Req]] = {}
        for req in reqs:
            node: TreeNode | None = self._match(req).node
            assert node is not None
            ends.setdefault(node, []).append(req)
            while node is not None:
                if node not in weights:
                    children.setdefault(node.parent, []).append(node)
                weights[node] += 1
                node = node.parent

        # A stack and not recursion: a long conversation is a deep path. A node is pushed a second time to be left.
        stack: list[tuple[TreeNode, bool]] = []

        def enter(parent: TreeNode | None) -> None:
            heaviest_first = sorted(children.get(parent, []), key=lambda child: -weights[child])
            stack.extend((child, False) for child in reversed(heaviest_first))

        enter(None)
        while stack:
            node, seen = stack.pop()
            if seen:
                yield from sorted(ends.get(node, []), key=lambda req: -self._match(req).pages_in_node)
            else:
                stack.append((node, True))
                enter(node)
