"""`OutputEstimator`: what all rules about future output have in common.

Admission promises memory: to a candidate for its prompt and `expected_of` its output, after what the requests with a
row are `expected` to add. Too much reserved in advance leaves the pool empty, too little ends in retractions. An
estimate is never a limit: whoever generates more than expected gets its pages all the same, as long as there are any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from ..arrays import BoolArray, IntArray

if TYPE_CHECKING:
    from ..requests.req import Req


CLIP_MAX_NEW_TOKENS: Final = 4096
"""Upper bound on the future tokens that an estimate counts for one request; never a limit on the output."""


class OutputEstimator(Protocol):
    """Learns from what happens. No clock and no randomness: the same calls give the same estimates, on any machine."""

    @property
    def current(self) -> float:
        """The share of its `max_new_tokens` that a request is expected to generate, 0..1, for the report."""
        ...

    def expected(
        self, to_come: IntArray, generated: IntArray, max_new: IntArray, ignore_eos: BoolArray
    ) -> float:
        """KV slots that the outputs of the requests with a row will still take.

        Args:
            to_come: [B] slots that each output can still take at most. For a request in the middle of its prompt,
                those behind the prompt.
            generated: [B] tokens of output so far.
            max_new: [B] each request's `max_new_tokens`.
            ignore_eos: [B] only the limit ends these outputs.
        """
        ...

    def expected_of(self, req: Req) -> int:
        """KV slots to keep for the output of a waiting request, beyond what it has generated before."""
        ...

    def after_decode(self) -> None:
        """A decode step found room for everybody."""
        ...

    def after_retraction(self, num_remaining: int, generated_tokens: int, max_new_tokens: int) -> None:
        """Memory ran out; the arguments are about the requests that keep their place, the last two are sums."""
        ...

    def finished(self, output_len: int, max_new_tokens: int) -> None:
        """A request ended by itself, after so many tokens."""
        ...

    def reset(self) -> None:
        """Nothing runs and nothing waits."""
        ...
