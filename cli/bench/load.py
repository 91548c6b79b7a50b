"""Drives a workload against a target: open loop on a schedule, optionally with a bound on requests in flight.

The same driver serves `bench serve` (HTTP) and `bench offline` (in process): a target turns one request into one
record. It also measures the lag of its own event loop, because that lag adds to every latency it measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .records import BenchRequest, RequestRecord

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
