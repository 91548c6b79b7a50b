"""Which heads, widths and rows of the vocabulary a rank takes of a layer that several ranks share."""

from __future__ import annotations

from typing import NamedTuple

from ..distributed.tp_group import TPGroup


class Span(NamedTuple):
    """`start`..`stop`-1 of something that is counted."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def times(self, factor: int, offset: int = 0) -> Span:
        """The same span, counted in pieces of which each of these has `factor`, behind `offset` others."""
        return Span(offset + self.start * factor, offset + self.stop * factor)


def equal_span(total: int, group: TPGroup) -> Span:
    """This rank's part of what divides evenly."""
    share, rest = divmod(total, group.size)
    assert not rest, f"{total} cannot be divided by {group.size}; `check_tp` lets nobody in with that"
    return Span(group.rank * share, (group.rank + 1) * share)


def kv_head_span(num_kv_heads: int, group: TPGroup) -> Span:
    """The key/value heads that this rank's query heads need; with fewer than ranks, several ranks have the same one."""
    if num_kv_heads >= group.size:
        return equal_span(num_kv_heads, group)
    assert group.size % num_kv_heads == 0, f"{num_kv_heads} KV heads for {group.size} ranks"
    head = group.rank * num_kv_heads // group.size
    return Span(head, head + 1)


def padded_span(total: int, group: TPGroup) -> Span:
    """This rank's part of what need not divide: the same length for all, so the last ones may reach beyond the end."""
    share = -(-total // group.size)
    return Span(group.rank * share, (group.rank + 1) * share)
