"""Drives a workload against a target: open loop on a schedule, optionally with a bound on requests in flight.

The same driver serves `bench serve` (HTTP) and `bench offline` (in process): a target turns one request into one
record. It also measures the lag of its own event loop, because that lag adds to every latency it measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


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


LAG_PROBE_INTERVAL_S = 0.05


class Target(Protocol):
    """Something that answers requests."""

    async def run(self, request: BenchRequest, record: RequestRecord) -> None:
        """Answer one request, writing arrivals and counts into its record; failures go into `record.error`."""
        ...


@dataclass(frozen=True, slots=True)
class LoadRun:
    """A finished run: its records, its wall time, and the CPU time and lag of the client.

    Attributes:
        records: one per request, in workload order.
        start_s, end_s: first request due, last answer complete.
        client_cpu_share: CPU cores that this process used during the run; None if the engine runs in it.
        client_lag_p99_s: 99th percentile of how late the event loop woke up.
    """

    records: list[RequestRecord]
    start_s: float
    end_s: float
    client_cpu_share: float | None
    client_lag_p99_s: float


async def run_load(
    target: Target,
    requests: Sequence[BenchRequest],
    offsets_s: Sequence[float],
    max_concurrency: int | None,
    on_progress: Callable[[RequestRecord], None],
) -> LoadRun:
    """Send every request at its time (or later, when `max_concurrency` are in flight) and wait for all answers."""
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    lags: list[float] = []
    probe = asyncio.create_task(_measure_lag(lags))
    cpu_before, start_s = time.process_time(), time.monotonic()

    async def run_one(request: BenchRequest, due_s: float) -> RequestRecord:
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        async with gate:
            record = RequestRecord(sent_s=time.monotonic(), due_s=due_s)
            await target.run(request, record)
            record.end_s = time.monotonic()
        on_progress(record)
        return record

    try:
        pairs = zip(requests, offsets_s, strict=True)
        records = await asyncio.gather(*(run_one(request, start_s + offset) for request, offset in pairs))
    finally:
        probe.cancel()
    end_s = max((record.end_s for record in records), default=start_s)
    lags.sort()
    return LoadRun(
        records=list(records),
        start_s=start_s,
        end_s=end_s,
        client_cpu_share=(time.process_time() - cpu_before) / max(end_s - start_s, 1e-9),
        client_lag_p99_s=lags[int(0.99 * (len(lags) - 1))] if lags else 0.0,
    )


async def _measure_lag(lags: list[float]) -> None:
    while True:
        before = time.monotonic()
        await asyncio.sleep(LAG_PROBE_INTERVAL_S)
        lags.append(time.monotonic() - before - LAG_PROBE_INTERVAL_S)
