"""`GrowOnDemand`: keeps nothing for outputs; whoever needs a page later takes it, or somebody's place (vLLM V1's way).

Most requests run at the same time, and most are retracted. It suits a large pool with short answers, and swapping,
which makes a lost place cheap. A prompt still has to fit as a whole before it is begun, or two of them could each hold
half of what the other one needs (vLLM's `full_sequence_must_fit`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..arrays import BoolArray, IntArray

if TYPE_CHECKING:
    from ..requests.req import Req


class GrowOnDemand:
    """Expects nothing."""

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
