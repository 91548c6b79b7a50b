"""Records with known times, and runs made of them."""

import numpy as np
import pytest

from engine.cli.bench.load import LoadRun, RequestRecord
from engine.cli.bench.result_file import RequestRow, Run
from engine.cli.bench.summary import summarize


@pytest.fixture
def make_record():
    """A record with a first token after `ttft` and further ones every `itl` seconds."""

    def make(sent=0.0, ttft=0.1, itl=0.01, tokens=5, **more):
        arrivals = [(sent + ttft + i * itl, 1) for i in range(tokens)]
        return RequestRecord(
            sent_s=sent,
            due_s=sent,
            arrivals=arrivals,
            end_s=arrivals[-1][0],
            prompt_tokens=10,
            output_tokens=tokens,
            **more,
        )

    return make


@pytest.fixture
def make_load_run():
    """A finished load of given records."""

    def make(records):
        end = max(record.end_s for record in records)
        return LoadRun(records=records, start_s=0.0, end_s=end, client_cpu_share=0.1, client_lag_p99_s=0.0)

    return make


@pytest.fixture
def make_run(make_record, make_load_run):
    """A benchmark run whose latencies scatter around a given speed."""

    def make(slowness=1.0, seed=0, num_requests=60):
        rng = np.random.default_rng(seed)
        records = [
            make_record(
                sent=0.05 * i,
                ttft=slowness * rng.uniform(0.08, 0.12),
                itl=slowness * rng.uniform(0.009, 0.011),
                tokens=40,
            )
            for i in range(num_requests)
        ]
        load = make_load_run(records)
        rows = [RequestRow.of(record, 0.0, details=False) for record in records]
        return Run(
            "serve", "2026-01-01T00:00:00+00:00", {"seed": 0}, None, {}, None, summarize(load, {}), rows
        )

    return make
