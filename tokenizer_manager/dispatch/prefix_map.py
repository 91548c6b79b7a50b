"""`PrefixMap`: which prompts the prefix cache of a replica should hold, to the tokenizer manager's knowledge.

It follows what was sent: a prompt that was sent to a replica is in its cache afterwards, until other prompts displace
it. A prompt is known by blocks of `BLOCK` tokens, each by a hash of itself and all before it, so that one dictionary
holds a tree. The oldest blocks leave when there are more than the KV pool holds. The scheduler's cache differs (it has
answers, too, and shares memory with running requests): when a request comes back with fewer cached tokens than
were expected, as many of the oldest blocks leave as were missing.

The idea of a router with an approximate tree for each worker is SGLang's router's; there it is a tree over text.
"""

# Shapes: L tokens of a prompt, B blocks of a prompt, the last one complete.

from __future__ import annotations

from collections import OrderedDict
from typing import Final

BLOCK: Final = 32
_BLOCK_BYTES: Final = BLOCK * 4


def block_hashes(input_ids: bytes, namespace: tuple[str, str]) -> list[int]:
    """The names of a prompt's blocks, [B].

    Args:
        input_ids: [L] int32.
        namespace: prompts of different ones share nothing, see `GenerateRequest.extra_key` and `lora_id`.
    """
    name = hash(namespace)
    view = memoryview(input_ids)
    names = []
    for start in range(0, len(input_ids) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        name = hash((name, bytes(view[start : start + _BLOCK_BYTES])))
        names.append(name)
    return names


class PrefixMap:
    """The blocks of one replica, the oldest ones first; a block is never older than those after it in a prompt."""

    def __init__(self, max_tokens: int) -> None:
        """Know no block.

        Args:
            max_tokens: of the replica's KV pool.
        """
        self._max_blocks = max(max_tokens // BLOCK, 1)
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        """Known blocks."""
        return len(self._blocks)

    def match(self, names: list[int]) -> int:
        """How many of a prompt's blocks are known, from its first one on."""
        low, high = 0, len(names)
        while low < high:  # a known block means that those before it are known
            middle = (low + high + 1) // 2
            if names[middle - 1] in self._blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def add(self, names: list[int]) -> None:
        """A prompt was sent to the replica."""
        kept = names[: self._max_blocks]
        for name in reversed(kept):  # the first block becomes the newest one
            self._blocks[name] = None
            self._blocks.move_to_end(name)
        self._drop(len(self._blocks) - self._max_blocks)

    def missed(self, num_blocks: int) -> None:
        """The replica's cache lacked so many blocks that were expected to be in it."""
        self._drop(min(num_blocks, len(self._blocks)))

    def clear(self) -> None:
        """The replica has a new, empty cache."""
        self._blocks.clear()

    def _drop(self, num_blocks: int) -> None:
        for _ in range(num_blocks):
            self._blocks.popitem(last=False)
