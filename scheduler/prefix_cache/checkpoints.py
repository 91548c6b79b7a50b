"""`Checkpoints`: the states at the ends of radix nodes, for models with state layers.

A state layer's state is exact at one token only, so a prefix can be reused only up to a token at which the state was
kept. A node's checkpoint is the state after the last token of its run. It goes when that token goes: when the node is
evicted or cut. It also goes when a newer one needs its slot: the least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable

from .radix_node import RadixNode


class Checkpoints:
    """The checkpoints of one tree, in the order of their last use."""

    def __init__(self, free: Callable[[int], None]) -> None:
        """`free`: takes back the slot of a checkpoint that has left the tree."""
        self._free = free
        self._nodes: OrderedDict[int, RadixNode] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def put(self, node: RadixNode, checkpoint: int) -> None:
        """Give a node its checkpoint; it had none."""
        assert not node.checkpoint, node.checkpoint
        node.checkpoint = checkpoint
        self._nodes[checkpoint] = node

    def used(self, node: RadixNode) -> None:
        """Note that a node's checkpoint was read, or would have been made again."""
        self._nodes.move_to_end(node.checkpoint)

    def removed(self, node: RadixNode) -> None:
        """The node has left the tree, or its last token has: free its checkpoint, if it has one."""
        if node.checkpoint:
            self._drop(node)

    def drop_oldest(self, keep: Collection[int]) -> bool:
        """Free the checkpoint that was not used for the longest time, except those in `keep`; False: there is none.

        Those of pinned nodes go when there are no others.
        """
        may_go = (node for checkpoint, node in self._nodes.items() if checkpoint not in keep)
        pinned: RadixNode | None = None
        for node in may_go:
            if not node.pin_ref:
                self._drop(node)
                return True
            pinned = pinned or node
        if pinned is None:
            return False
        self._drop(pinned)
        return True

    def _drop(self, node: RadixNode) -> None:
        del self._nodes[node.checkpoint]
        self._free(node.checkpoint)
        node.checkpoint = 0

    def taken(self) -> list[int]:
        """The slots of all checkpoints; for checks."""
        return list(self._nodes)

    def verify(self, nodes: Iterable[RadixNode]) -> list[str]:
        """Errors found, by all nodes of the tree."""
        in_tree = {node.checkpoint: node for node in nodes if node.checkpoint}
        if in_tree.keys() != self._nodes.keys() or any(
            self._nodes[each] is not in_tree[each] for each in in_tree
        ):
            return [f"the nodes have the checkpoints {sorted(in_tree)}, known are {sorted(self._nodes)}"]
        return [f"a root has checkpoint {each}" for each, node in in_tree.items() if node.parent is None]
