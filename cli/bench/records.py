"""`BenchRequest` and `RequestRecord`: a request of a benchmark and its measured result.

All times are seconds on the monotonic clock of the measuring process. A record keeps the arrival of every piece of
output, so that each figure of the summary can be recomputed from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """One request of a workload.

    Attributes:
        prompt: text, or token ids where the workload fixes the exact length.
        prompt_len: tokens of the prompt, as counted when the workload was generated.
        output_len: tokens to generate.
        group: which shared prefix it belongs to, -1 for none.
        arrival_s: after the first one, if the workload has times.
        texts: of a request of vectors, which has no prompt and no output.
    """

    prompt: str | list[int]
    prompt_len: int
    output_len: int
    group: int = -1
    arrival_s: float = 0.0
    texts: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """The result of one request.

    Attributes:
        sent_s: when it was sent (after waiting for the concurrency limit).
        due_s: when the arrival process scheduled it; a later `sent_s` shows a slow client or the concurrency limit.
        arrivals: (time, tokens in this piece), in order; the first is the first token.
        end_s: when the answer was complete or failed.
        prompt_tokens, output_tokens, cached_tokens: as the server counts them.
        error: why it failed; None for success.
        refused: it failed because it is refused, as an equal one would be.
        num_vectors: vectors of the answer; 0 for a text.
        valid: whether the answer matches the schema of `--structured`; None without one.
    """

    sent_s: float
    due_s: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    end_s: float = 0.0
    error: str | None = None
    refused: bool = False
    num_vectors: int = 0
    valid: bool | None = None

    @property
    def ok(self) -> bool:
        """Whether a complete answer came."""
        return self.error is None and bool(self.arrivals)

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.arrivals[0][0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Time from sending to the last piece of output."""
        return self.arrivals[-1][0] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / (self.output_tokens - 1)

    def itls_s(self) -> list[float]:
        """Gaps between tokens. A piece of k tokens counts as k equal gaps that add up to the wait for it."""
        gaps: list[float] = []
        for (before, _), (now, num_tokens) in zip(self.arrivals, self.arrivals[1:], strict=False):
            gaps.extend([(now - before) / num_tokens] * num_tokens)
        return gaps
