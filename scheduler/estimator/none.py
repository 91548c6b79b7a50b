"""`GrowOnDemand`: reserves nothing for outputs; a page is allocated, or a request retracted, when needed (vLLM V1).

It runs the most requests at the same time and retracts the most. It suits a large pool with short answers, and
swapping, which makes a retraction cheap. A prompt must still fit as a whole before it starts: otherwise two prompts
could each hold half of the memory that the other one needs (vLLM's `full_sequence_must_fit`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..arrays import BoolArray, IntArray

if TYPE_CHECKING:
    from ..requests.req import Req


class GrowOnDemand:
    """Reserves nothing for outputs."""

    __slots__ = ()

    current = 0.0

    def expected(
        self, to_come: IntArray, generated: IntArray, max_new: IntArray, ignore_eos: BoolArray
    ) -> float:
        return 0.0

    def expected_of(self, req: Req) -> int:
        return 0

    def after_decode(self) -> None:
        pass

    def after_retraction(self, num_remaining: int, generated_tokens: int, max_new_tokens: int) -> None:
        pass

    def finished(self, output_len: int, max_new_tokens: int) -> None:
        pass

    def reset(self) -> None:
        pass
