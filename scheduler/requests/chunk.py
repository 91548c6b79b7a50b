"""`Chunk`: a run of prompt tokens of one request that a step computes."""

from __future__ import annotations

from typing import NamedTuple

from .req import Req


class Chunk(NamedTuple):
    """A run of prompt tokens that the step computes.

    Attributes:
        req: the request.
        start: position of the first token.
        length: number of tokens.
        is_first: whether the request was admitted in this pass.
        is_last: whether the prompt ends with this chunk, so that a token is sampled.
    """

    req: Req
    start: int
    length: int
    is_first: bool
    is_last: bool
