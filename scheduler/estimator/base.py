"""`OutputEstimator`: the interface of all rules that estimate future output.

Admission reserves memory for the prompt of a candidate and `expected_of` its output; the `expected` output of the
requests with a row is reserved before that. Too large a reservation leaves the pool empty, too small a one ends in
retractions. An estimate is never a limit: a request that generates more than expected gets pages while there are any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from ..arrays import BoolArray, IntArray

if TYPE_CHECKING:
    from ..requests.req import Req


CLIP_MAX_NEW_TOKENS: Final = 4096
"""Upper bound on the future tokens that an estimate counts for one request; never a limit on the output."""


class OutputEstimator(Protocol):
    """Learns from the calls below. No clock and no randomness: the same calls give the same estimates everywhere."""

    @property
    def current(self) -> float:
        """The share of its `max_new_tokens` that a request is expected to generate, 0..1, for the report."""
        ...

    def expected(
        self, to_come: IntArray, generated: IntArray, max_new: IntArray, ignore_eos: BoolArray
    ) -> float:
        """KV slots that the outputs of the requests with a row will still take.

        Args:
            to_come: [B] slots that each output can still take at most. For a partial prefill, the slots after the
                prompt.
            generated: [B] tokens of output so far.
            max_new: [B] each request's `max_new_tokens`.
            ignore_eos: [B] only the limit ends these outputs.
        """
        ...

    def expected_of(self, req: Req) -> int:
        """KV slots to reserve for the output of a waiting request, beyond the tokens it has already generated."""
        ...

    def after_decode(self) -> None:
        """A decode step found pages for all running requests."""
        ...

    def after_retraction(self, num_remaining: int, generated_tokens: int, max_new_tokens: int) -> None:
        """Memory ran out; the arguments describe the requests that keep running, the last two are sums."""
        ...

    def finished(self, output_len: int, max_new_tokens: int) -> None:
        """A request ended by itself, after `output_len` tokens."""
        ...

    def reset(self) -> None:
        """No request runs or waits."""
        ...
