"""The spans of heads, MLP width and vocabulary rows that a rank takes of a layer with tensor parallelism."""

from __future__ import annotations

from typing import NamedTuple

from ..distributed.tp_group import TPGroup


class Span(NamedTuple):
    """The indices `start`..`stop`-1."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def times(self, factor: int, offset: int = 0) -> Span:
        """The same span in a finer unit: one index here is `factor` indices there, after the first `offset`."""
        return Span(offset + self.start * factor, offset + self.stop * factor)


def equal_span(total: int, group: TPGroup) -> Span:
    """This rank's part of a total that divides evenly by the ranks."""
    share, rest = divmod(total, group.size)
    assert not rest, f"{total} cannot be divided by {group.size}; `check_tp` refuses such sizes"
    return Span(group.rank * share, (group.rank + 1) * share)


def kv_head_span(num_kv_heads: int, group: TPGroup) -> Span:
    """The KV heads that this rank's query heads read; with fewer KV heads than ranks, several ranks share one."""
    if num_kv_heads >= group.size:
        return equal_span(num_kv_heads, group)
    assert group.size % num_kv_heads == 0, f"{num_kv_heads} KV heads for {group.size} ranks"
    head = group.rank * num_kv_heads // group.size
    return Span(head, head + 1)


def padded_span(total: int, group: TPGroup) -> Span:
    """This rank's part of a total that need not divide evenly: equal lengths, so the last may exceed the total."""
    share = -(-total // group.size)
    return Span(group.rank * share, (group.rank + 1) * share)
