"""`Chunk`: a run of prompt tokens of one request that a step computes."""

from __future__ import annotations

from typing import NamedTuple

from .req import Req


class Chunk(NamedTuple):
    """A run of prompt tokens that the step computes.

    Attributes:
        req: whose.
        start: position of the first token.
        length: how many.
        is_first: the request was admitted in this pass.
        is_last: the prompt ends here, a token is sampled.
    """

    req: Req
    start: int
    length: int
    is_first: bool
    is_last: bool
