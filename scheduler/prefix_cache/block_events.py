"""`BlockEvents`: what the prefix tree stored and removed, in blocks of a fixed size, as plain values for a publisher.

A block is a run of tokens that ends at a multiple of the block size, counted from the start of the prompt. Its hash is
chained: a digest of the hash of the block before it, or of the adapter for the first block, and of its tokens; an image
counts with its digest. So equal prefixes have equal hashes in every process, now and later. A block is announced when
its last page enters the tree, and withdrawn when its last page leaves.

Blocks and nodes do not coincide: pages may be smaller than blocks, so a block may begin in one node and end in the
next, and siblings may share the beginning of their first blocks. Each block belongs to the node in which it ends, which
is one node only. Splits change the owner of blocks and announce nothing.

Prefixes with a cache salt are private: their blocks are not announced.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from ..arrays import TOKEN_ID_BYTES
from .base import split_namespace
from .radix_node import RadixNode, path_to_root

LEAST_BLOCK_TOKENS: Final = 16
"""Pages smaller than this are announced in blocks of several pages: an event per token would cost more than it says."""

MAX_REMOVED: Final = 4096
"""Hashes in one `BlocksRemoved`. Together with the publisher's limit it keeps a flush below the 16 MiB that subscribers
accept in one message."""

OfTokens = Callable[[bytes], bytes]
"""Makes bytes of the token ids of whole blocks."""

_HASH_BYTES: Final = 8
_PURPOSE: Final = b"engine-kv-block"


class BlocksStored(NamedTuple):
    """Blocks that follow each other have entered the tree.

    Attributes:
        hashes: of the blocks, in order.
        parent_hash: of the block before the first one; None: it is the first of its prompt.
        token_ids: int32 bytes of their tokens, the model's placeholder where an image is.
        lora_id: fingerprint of the adapter that computed them; "" for none.
    """

    hashes: list[int]
    parent_hash: int | None
    token_ids: bytes
    lora_id: str


class BlocksRemoved(NamedTuple):
    """Blocks have left the tree."""

    hashes: list[int]


class AllBlocksCleared(NamedTuple):
    """No block is in the tree: what was announced before is void."""


BlockEvent = BlocksStored | BlocksRemoved | AllBlocksCleared


def block_size_for(page_size: int) -> int:
    """Tokens per block: a page, or the fewest pages with `LEAST_BLOCK_TOKENS`."""
    return -(-max(page_size, LEAST_BLOCK_TOKENS) // page_size) * page_size


class BlockRecorder:
    """Notified by `RadixCache` after each change of the tree. This base records nothing."""

    def inserted(self, node: RadixNode) -> None:
        """A node was added under its parent."""

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """`lower` was split; `upper` has the beginning of its run."""

    def truncated(self, node: RadixNode) -> None:
        """The end of a leaf's run was cut off."""

    def removed(self, node: RadixNode) -> None:
        """A leaf has left the tree."""

    def cleared(self) -> None:
        """The last page has left the tree."""

    def take(self) -> Sequence[BlockEvent]:
        """The events since the last call, in order."""
        return ()


class _Run:
    """The blocks that end in a node.

    Attributes:
        start: bytes of token ids from the start of the prompt to the node's run.
        before: hash of the last block that ends at `start` or before; of the adapter, if there is none.
        hashes: of the blocks that end in the run.
        lora_id: as in `BlocksStored`.
    """

    __slots__ = ("before", "hashes", "lora_id", "start")

    def __init__(self, start: int, before: int, hashes: list[int], lora_id: str) -> None:
        self.start = start
        self.before = before
        self.hashes = hashes
        self.lora_id = lora_id

    @property
    def last(self) -> int:
        """Hash of the last block that ends at the end of the run or before."""
        return self.hashes[-1] if self.hashes else self.before


class BlockEvents(BlockRecorder):
    """Records every change of the tree of one `RadixCache`."""

    def __init__(self, block_size: int, portable: OfTokens = bytes, ordinary: OfTokens = bytes) -> None:
        """Record from an empty tree on.

        Args:
            block_size: tokens per block; a multiple of the page size.
            portable, ordinary: of `MediaIds`: what is hashed for a block, and the tokens that are announced.
        """
        self._portable, self._ordinary = portable, ordinary
        self._block_bytes = block_size * TOKEN_ID_BYTES
        self._runs: dict[RadixNode, _Run] = {}
        self._events: list[BlockEvent] = []

    def inserted(self, node: RadixNode) -> None:
        run = self._open_run(node)
        if run is None:
            return
        self._runs[node] = run
        begun = run.start % self._block_bytes  # bytes of the first block that lie above the node
        token_ids = self._end_of_prefix(node, begun) + node.key if begun else node.key
        last = run.before
        for begin in range(0, len(token_ids) - self._block_bytes + 1, self._block_bytes):
            block = token_ids[begin : begin + self._block_bytes]
            last = chained_hash(last, self._portable(block))
            run.hashes.append(last)
        if run.hashes:
            parent_hash = run.before if run.start >= self._block_bytes else None
            whole = self._ordinary(token_ids[: len(run.hashes) * self._block_bytes])
            self._events.append(BlocksStored(list(run.hashes), parent_hash, whole, run.lora_id))

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        run = self._runs.get(lower)
        if run is None:
            return
        count = self._num_blocks(run.start, len(upper.key))
        above = self._runs[upper] = _Run(run.start, run.before, run.hashes[:count], run.lora_id)
        run.start += len(upper.key)
        run.before = above.last
        run.hashes = run.hashes[count:]

    def truncated(self, node: RadixNode) -> None:
        run = self._runs.get(node)
        if run is not None:
            count = self._num_blocks(run.start, len(node.key))
            self._withdraw(run.hashes[count:])
            del run.hashes[count:]

    def removed(self, node: RadixNode) -> None:
        run = self._runs.pop(node, None)
        if run is not None:
            self._withdraw(run.hashes)

    def cleared(self) -> None:
        assert not self._runs, f"{len(self._runs)} nodes are left in an empty tree"
        self._events = [AllBlocksCleared()]  # earlier events are void

    def take(self) -> Sequence[BlockEvent]:
        events, self._events = self._events, []
        return events

    def hashes(self) -> set[int]:
        """Return the hashes of all blocks in the tree; for checks."""
        return {block_hash for run in self._runs.values() for block_hash in run.hashes}

    def _open_run(self, node: RadixNode) -> _Run | None:
        """The run of a new node, without its blocks; None if its prefix is private."""
        parent = node.parent
        assert parent is not None
        above = self._runs.get(parent)
        if above is not None:
            return _Run(above.start + len(parent.key), above.last, [], above.lora_id)
        if parent.namespace is None:
            return None  # below a private node
        salt, lora_id = split_namespace(parent.namespace)
        return None if salt else _Run(0, first_hash(lora_id), [], lora_id)

    def _end_of_prefix(self, node: RadixNode, num_bytes: int) -> bytes:
        """The last bytes of the token ids before a node's run."""
        parts: list[bytes] = []
        missing = num_bytes
        for each in path_to_root(node):
            if each is not node:
                parts.append(each.key[-missing:])
                missing -= len(parts[-1])
                if not missing:
                    break
        return b"".join(reversed(parts))

    def _num_blocks(self, start: int, num_bytes: int) -> int:
        """Number of blocks that end in a run."""
        return (start + num_bytes) // self._block_bytes - start // self._block_bytes

    def _withdraw(self, hashes: list[int]) -> None:
        for begin in range(0, len(hashes), MAX_REMOVED):
            part = hashes[begin : begin + MAX_REMOVED]
            last = self._events[-1] if self._events else None
            if isinstance(last, BlocksRemoved) and len(last.hashes) + len(part) <= MAX_REMOVED:
                last.hashes.extend(part)
            else:
                self._events.append(BlocksRemoved(part))


def first_hash(lora_id: str) -> int:
    """Digest of the adapter, to which the hash of a prompt's first block is chained."""
    return _digest(lora_id.encode())


def chained_hash(before: int, token_ids: bytes) -> int:
    """The hash of a block after the block (or adapter) with this hash.

    It has 63 bits, so that readers of signed and of unsigned integers agree on it.
    """
    return _digest(before.to_bytes(_HASH_BYTES, "little") + token_ids)


def _digest(data: bytes) -> int:
    digest = hashlib.blake2b(data, digest_size=_HASH_BYTES, person=_PURPOSE).digest()
    return int.from_bytes(digest, "little") >> 1
