"""`Prefix`: the beginning of a waiting request that need not be computed, wherever it comes from."""

from __future__ import annotations

from typing import NamedTuple

from .base import PrefixMatch


class Prefix(NamedTuple):
    """What a request would start with if it were admitted now.

    Attributes:
        match: the pages that the prefix cache has; they are leased and take no new memory.
        ready_len: tokens that need not be computed. Equal to the match's tokens, or more: the KV behind the match comes
            back from the host, or is copied from a sibling's last page; it takes new pages, but no computing.
    """

    match: PrefixMatch
    ready_len: int
