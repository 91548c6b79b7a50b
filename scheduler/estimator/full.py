"""`FullReservation`: keeps the memory of each request's longest possible output. Nobody is ever retracted.

For clients whose limits are tight, or who must not see a pause (mini-sglang works like this). The price: with an
answer of a tenth of its limit, nine tenths of what is kept stays empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..arrays import BoolArray, IntArray

if TYPE_CHECKING:
    from ..requests.req import Req


class FullReservation:
    """Why no retraction is needed: of each request with a row, the pages it can still ask for are kept.

    It holds pages for the c tokens computed and can need ceil(m / page) pages in all. Since ceil(m / page) -
    ceil(c / page) <= ceil((m - c) / page), `expected` counts no less. A candidate is asked for its prompt, its
    output and a page, which is no less than its pages; and decodes take only what was counted.
    """

    __slots__ = ("_page_size",)

    current = 1.0

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size

    def expected(
        self, to_come: IntArray, generated: IntArray, max_new: IntArray, ignore_eos: BoolArray
    ) -> float:
        """All that is to come, of each request in whole pages."""
        pages = -(-to_come // self._page_size)
        return float(int(pages.sum()) * self._page_size)

    def expected_of(self, req: Req) -> int:
        return req.max_new_tokens - req.output_len

    def after_decode(self) -> None:
        """Nothing to learn."""

    def after_retraction(self, num_remaining: int, generated_tokens: int, max_new_tokens: int) -> None:
        """Only a fault on purpose, or somebody more urgent, does this."""

    def finished(self, output_len: int, max_new_tokens: int) -> None:
        """Nothing to learn."""

    def reset(self) -> None:
        """Nothing was learned."""
