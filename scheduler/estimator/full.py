"""`FullReservation`: reserves memory for each request's longest possible output. No request runs out of memory.

For clients with tight limits, or without tolerance for a pause (mini-sglang works like this). The cost: if answers
reach a tenth of their limits, nine tenths of the reserved memory stay empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..arrays import BoolArray, IntArray

if TYPE_CHECKING:
    from ..requests.req import Req


class FullReservation:
    """Why no retraction is needed: for each request with a row, all pages that it can still need are reserved.

    A request holds pages for its c computed tokens and can need ceil(m / page) pages in all. Since ceil(m / page) -
    ceil(c / page) <= ceil((m - c) / page), `expected` counts at least the missing pages. A candidate must find memory
    for its prompt, its output and a page, which is at least its pages. Decodes take only pages that were counted.
    """

    current = 1.0

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size

    def expected(
        self, to_come: IntArray, generated: IntArray, max_new: IntArray, ignore_eos: BoolArray
    ) -> float:
        """All of `to_come`, rounded up to whole pages per request."""
        pages = -(-to_come // self._page_size)
        return float(int(pages.sum()) * self._page_size)

    def expected_of(self, req: Req) -> int:
        return req.max_new_tokens - req.output_len

    def after_decode(self) -> None:
        """Nothing to learn."""

    def after_retraction(self, num_remaining: int, generated_tokens: int, max_new_tokens: int) -> None:
        """Nothing to learn: only `--chaos` or a more urgent request causes a retraction."""

    def finished(self, output_len: int, max_new_tokens: int) -> None:
        """Nothing to learn."""

    def reset(self) -> None:
        """Nothing was learned."""
